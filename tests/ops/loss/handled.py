"""The calls that this family's handlers take, by names that begin with their symbol, and the calls that they refuse."""

import numpy as np

from ..handled import a, i32


HANDLED = {
    "softmax_cross_entropy": ([a(2, 1), i32(2)], a(2), {}),
    "softmax_cross_entropy_backward": ([a(2, 3), i32(2), a(2), a(2)], a(2, 3), {}),
}
NOT_HANDLED = [
    ("softmax_cross_entropy", [a(2, 3), a(2)], a(2), {}, r"labels of int32"),
    ("softmax_cross_entropy", [a(2, 3), i32(2)], i32(2), {}, r"the loss of float32"),
    ("softmax_cross_entropy", [a(2, 3), i32(3)], a(2), {}, r"a label and a loss for each row .*got \(3\) and \(2\)"),
    ("softmax_cross_entropy", [a(2, 3), i32(2)], a(2, 3), {}, r"a label and a loss for each row"),
    ("softmax_cross_entropy", [a(2, 3), i32(2)], a(2), {"z_loss": np.float32(1)}, r"z_loss to be an attribute"),
    ("softmax_cross_entropy", [a(2, 3), i32(2)], a(2), {"ignore_index": "1"}, r"ignore_index to be an attribute"),
    ("softmax_cross_entropy", [a(2, 3), i32(2)], a(2), {"other": "1"}, r"no other attribute than label_smoothing"),
    ("softmax_cross_entropy", [i32(2, 3), i32(2)], a(2), {}, r"arrays of float32, bfloat16 or float16"),
    (
        "softmax_cross_entropy_backward",
        [a(2, 3), i32(2), a(2), a(3)],
        a(2, 3),
        {},
        r"a cotangent of the type of the loss",
    ),
    ("softmax_cross_entropy_backward", [a(2, 3), i32(2), a(2), a(2)], a(2, 4), {}, r"and a gradient of that of the"),
]
