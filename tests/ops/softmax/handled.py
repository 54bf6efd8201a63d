"""The calls that this family's handlers take, by names that begin with their symbol, and the calls that they refuse."""

from typing import Any

import numpy as np

from ..handled import a


def attributes(present: int, **more: int) -> dict[str, Any]:
    return {"scale": np.float64(2), "present": np.int64(present), **{key: np.int64(x) for key, x in more.items()}}


X, QUARTERS, MASK, OF_X = a(2, 4), a(2, 4) + np.float32(0.25), a(4, dtype=bool), {"needs_grad": 1}
HANDLED = {
    "softmax": ([X, MASK], X, attributes(3)),
    "softmax, plain": ([X], QUARTERS, attributes(1)),
    "softmax_backward": ([X, MASK, X, X], X, attributes(3, **OF_X)),
    "softmax_backward, plain": ([X, X, X], X, attributes(1, **OF_X)),
}
OF_AXES = r"a mask of the last axes of x, of shape \(2, 4\); got "
NOT_HANDLED = [
    ("softmax", [X], a(2, 3), attributes(1), r"softmax\[native\]: expected a result of the type of x\."),
    ("softmax", [a()], a(), attributes(1), r"x with at least 1 axes; got the shape \(\)"),
    ("softmax", [MASK], MASK, attributes(1), r"arrays of float32, bfloat16 or float16"),
    ("softmax", [X, X], X, attributes(3), r"a mask of bool"),
    ("softmax", [X, a(dtype=bool)], X, attributes(3), r"a mask with at least 1 axes"),
    ("softmax", [X, a(2, dtype=bool)], X, attributes(3), OF_AXES + r"\(2\)"),
    ("softmax", [X, a(3, 4, dtype=bool)], X, attributes(3), OF_AXES + r"\(3, 4\)"),
    ("softmax_backward", [X, a(1, 2, 4, dtype=bool), X, X], X, attributes(3, **OF_X), OF_AXES + r"\(1, 2, 4\)"),
    ("softmax_backward", [X, X, a(4)], X, attributes(1, **OF_X), r"a cotangent of the type of x"),
    (
        "softmax_backward",
        [X, X, X],
        a(4),
        attributes(1, **OF_X),
        r"gradients of the types of the operands; got \(4\)",
    ),
    (
        "softmax_backward",
        [X, MASK, X, X],
        [X, MASK],
        attributes(3, needs_grad=3),
        r"needs_grad to be a mask of operands of floating type; got 3",
    ),
]
