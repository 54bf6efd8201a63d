"""The calls that this family's handlers take, by names that begin with their symbol, and the calls that they refuse."""

import numpy as np

from ..handled import BF16, OF_TYPES, a, i32, needs, present


EPS = {"eps": np.float64(1e-5)}
RMS = {**EPS, "center": np.bool_(False)}
GROUPS = {**EPS, "groups": np.int64(2)}
X = present(0, **RMS)
XW = present(0, 1, **RMS)
XWB = present(0, 1, 2, **RMS)
GROUP = present(0, **GROUPS)
ADD = present(0, 1, **EPS)
DX = needs((0,), (0,), **RMS)
DXW = needs((0, 1), (0, 1), **RMS)

HANDLED = {
    "norm": ([a(2, 3), a(3), a(3)], a(2, 3), present(0, 1, 2, **RMS)),
    "norm, plain": ([a(2, 3)], a(2, 3), present(0, **RMS)),
    "norm, a bias": ([a(2, 3), a(3)], a(2, 3), present(0, 2, **RMS)),
    "norm_backward": (
        [a(2, 3), a(3), a(3), a(2, 3), a(2, 3)],
        [a(2, 3), a(3), a(3)],
        needs((0, 1, 2), (0, 1, 2), **RMS),
    ),
    "norm_backward, a bias": ([a(2, 3), a(3), a(2, 3), a(2, 3)], [a(2, 3), a(3)], needs((0, 2), (0, 2), **RMS)),
    "norm_backward, of x": ([a(2, 3), a(3), a(2, 3), a(2, 3)], a(2, 3), needs((0, 1), (0,), **RMS)),
    "norm_backward, of a bias": ([a(2, 3), a(3), a(3), a(2, 3), a(2, 3)], a(3), needs((0, 1, 2), (2,), **RMS)),
    "group_norm": ([a(2, 4, 3), a(4), a(4)], a(2, 4, 3), present(0, 1, 2, **GROUPS)),
    "group_norm, a bias": ([a(2, 4, 3), a(4)], a(2, 4, 3), present(0, 2, **GROUPS)),
    "group_norm_backward": (
        [a(2, 4, 3), a(4), a(4), a(2, 4, 3), a(2, 4, 3)],
        [a(2, 4, 3), a(4), a(4)],
        needs((0, 1, 2), (0, 1, 2), **GROUPS),
    ),
    "group_norm_backward, of a bias": ([a(2, 4, 3), a(4), a(2, 4, 3), a(2, 4, 3)], a(4), needs((0, 2), (2,), **GROUPS)),
    "add_rms_norm": ([a(2, 3), a(2, 3), a(3)], [a(2, 3), a(2, 3)], present(0, 1, 2, **EPS)),
    "add_rms_norm, plain": ([a(2, 3), a(2, 3)], [a(2, 3), a(2, 3)], present(0, 1, **EPS)),
}
NOT_HANDLED = [
    ("norm", [a(2, 3)], a(2, 4), X, r"norm\[native\]: expected a result of the type of x\."),
    ("norm", [a(2, 3)], a(2, 3, dtype=BF16), X, r"expected a result of the type of x"),
    ("norm", [a()], a(), X, r"norm\[native\]: expected x with at least 1 axes; got the shape \(\)"),
    ("norm", [i32(3)], i32(3), X, r"norm\[native\]: expected arrays of float32, bfloat16 or float16"),
    ("norm", [a(2, 3), a(4)], a(2, 3), XW, r"a weight of shape \(3,\); got \(4\)"),
    ("norm", [a(2, 3), a(2, 3)], a(2, 3), XW, r"a weight of shape \(3,\); got \(2, 3\)"),
    ("norm", [a(2, 3), a(3, dtype=BF16)], a(2, 3), XW, r"norm\[native\]: expected a weight of float32"),
    ("norm", [a(2, 3), a(3), a(2)], a(2, 3), XWB, r"a bias of shape \(3,\); got \(2\)"),
    ("norm", [a(2, 3), i32(3)], a(2, 3), present(0, 2, **RMS), r"a bias of float32"),
    ("norm", [a(2, 3), a(3)], a(2, 3), XWB, r"3 operands, 3 of them in the mask `present`; got 2"),
    ("norm", [a(2, 3), a(3)], a(2, 3), X, r"1 operands, 1 of them in the mask `present`; got 2"),
    ("norm", [a(3), a(3)], a(3), present(1, 2, **RMS), r"x to be present; got the mask 6"),
    ("norm", [a(2, 3)], a(2, 3), present(3, **RMS), r"present to be a mask of 3 bits; got 8"),
    ("norm", [a(2, 3)], a(2, 3), {**X, "present": np.int64(-1)}, r"present to be a mask of 3 bits; got -1"),
    ("norm", [a(2, 3)], a(2, 3), {**X, "present": np.int64(0)}, r"x to be present; got the mask 0"),
    ("norm_backward", [a(2, 3), a(2, 3), a(3)], a(2, 3), DX, r"a cotangent of the type of x"),
    ("norm_backward", [a(2, 3), a(2, 3), a(2, 3)], a(3, 2), DX, OF_TYPES + r"\(3, 2\) for \(2, 3\)"),
    ("norm_backward", [a(2, 3), a(2, 3), a(2, 3)], a(2, 3, dtype=BF16), DX, OF_TYPES),
    ("norm_backward", [a(2, 3), a(3), a(2, 3), a(2, 3)], [a(2, 3), a(2)], DXW, OF_TYPES + r"\(2\) for \(3\)"),
    ("norm_backward", [a(2, 3), a(3), a(2, 3), a(2, 3)], [a(2, 3), i32(3)], DXW, OF_TYPES),
    ("norm_backward", [a(2, 3), a(2), a(2, 3), a(2, 3)], [a(2, 3), a(2)], DXW, r"a weight of shape \(3,\); got \(2\)"),
    (
        "norm_backward",
        [a(2, 3), a(2), a(2, 3), a(2, 3)],
        [a(2, 3), a(2)],
        needs((0, 2), (0, 2), **RMS),
        r"a bias of shape \(3,\); got \(2\)",
    ),
    ("norm_backward", [a(2, 3), a(2, 3), a(2, 3)], [a(2, 3), a(3)], DX, r"1 results, one for each operand in the mask"),
    ("norm_backward", [a(2, 3), a(2, 3), a(2, 3)], a(3), needs((0,), (1,), **RMS), r"operands that are present"),
    (
        "norm_backward",
        [a(2, 3), a(2, 3), a(2, 3)],
        a(3),
        needs((0,), (3,), **RMS),
        r"needs_grad to be a mask of 3 bits",
    ),
    (
        "norm_backward",
        [a(2, 3), a(2, 3), a(2, 3)],
        a(2, 3),
        {**DX, "needs_grad": np.int64(-1)},
        r"needs_grad to be a mask of 3 bits; got -1",
    ),
    ("norm_backward", [a(2, 3), a(2, 3)], a(2, 3), DX, r"3 operands, 1 of them in the mask `present`; got 2"),
    ("group_norm", [a(3)], a(3), GROUP, r"x with at least 2 axes"),
    ("group_norm", [a(3, 5)], a(3, 5), GROUP, r"groups that divide 3 channels; got 2"),
    ("group_norm", [a(4, 5)], a(4, 5), {**GROUP, "groups": np.int64(0)}, r"groups that divide 4 channels; got 0"),
    (
        "group_norm_backward",
        [a(2, 4, 3), a(2, 4, 3), a(2, 4, 4)],
        a(2, 4, 3),
        needs((0,), (0,), **GROUPS),
        r"a cotangent of the type of x",
    ),
    ("group_norm", [a(4, 5), a(5)], a(4, 5), present(0, 1, **GROUPS), r"a weight of shape \(4,\); got \(5\)"),
    ("group_norm", [a(4, 5)], a(4, 6), GROUP, r"a result of the type of x"),
    ("add_rms_norm", [a(2, 3), a(2, 4)], [a(2, 3), a(2, 3)], ADD, r"residual and results of the type of x"),
    ("add_rms_norm", [a(2, 3), a(2, 3)], [a(2, 3), a(2, 3, dtype=BF16)], ADD, r"residual and results of the type of x"),
    (
        "add_rms_norm",
        [a(2, 3), a(2, 3), a(2)],
        [a(2, 3), a(2, 3)],
        present(0, 1, 2, **EPS),
        r"a weight of shape \(3,\); got \(2\)",
    ),
]
