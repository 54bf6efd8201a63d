"""The calls that the function refuses, and what it says."""

import numpy as np

from eqxcallback import ops

from ..zeros import f32, i32


def mask(*shape):
    return np.ones(shape, bool)


REFUSED = [
    (lambda: ops.softmax(i32(3)), r"softmax: expected x of one floating dtype; got x: int32\[3\]\."),
    (lambda: ops.softmax(f32()), r"softmax: expected x with at least one axis; got x: float32\[\]\."),
    (
        lambda: ops.softmax(f32(2, 3), f32(2, 3)),
        r"softmax: expected a bool mask that broadcasts to x; got mask: float32\[2,3\], x: float32\[2,3\]\.",
    ),
    (lambda: ops.softmax(f32(2, 3), mask(2)), r"a bool mask that broadcasts to x"),
    (lambda: ops.softmax(f32(2, 3), mask(1, 2, 3)), r"a bool mask that broadcasts to x"),
    (lambda: ops.softmax(f32(2, 3), scale=np.inf), r"softmax: expected scale to be a finite number; got inf\."),
    (
        lambda: ops.softmax(f32(2, 3), scale="1"),  # pyright: ignore[reportArgumentType]
        r"softmax: expected scale to be a finite number; got '1'\.",
    ),
]
