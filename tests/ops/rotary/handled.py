"""The calls that this family's handlers take, by names that begin with their symbol, and the calls that they refuse."""

import numpy as np

from ..handled import BF16, OF_TYPES, a, i32


ROTARY_BACKWARD = [a(2, 3, 2, 4), a(3, 2), a(3, 2), a(2, 3, 2, 4), a(2, 3, 2, 4)]
ROTARY = r"rotary_embedding\[native\]: expected cos and sin of shape"
TABLE = {"needs_grad": np.int64(7)}
# Two tokens of three heads, two of which are of the caches.
APPEND = [a(2, 3, 4), a(2, 2), a(2, 2), a(5, 1, 4), a(5, 1, 4), i32()]
APPENDED = [a(2, 1, 4), a(5, 1, 4), a(5, 1, 4)]


def _append(*changes, results=APPENDED, message):
    """A call with other operands, given as pairs of a place and an array."""
    args = list(APPEND)
    for place, array in changes:
        args[place] = array
    return "rotary_append", args, results, {}, message


HANDLED = {
    "rotary_embedding": ([a(2, 3, 2, 4), a(3, 2), a(3, 2)], a(2, 3, 2, 4), {}),
    "rotary_embedding_backward": (
        ROTARY_BACKWARD,
        [a(2, 3, 2, 4), a(3, 2), a(3, 2)],
        {"needs_grad": np.int64(7)},
    ),
    "rotary_embedding_backward, of x": (ROTARY_BACKWARD, a(2, 3, 2, 4), {"needs_grad": np.int64(1)}),
    "rotary_append": (APPEND, APPENDED, {}),
    "rotary_embedding_backward, of sin": (ROTARY_BACKWARD, a(3, 2), {"needs_grad": np.int64(4)}),
}
NOT_HANDLED = [
    ("rotary_embedding", [a(2, 4), a(2, 2), a(2, 2)], a(2, 4), {}, r"x with at least 3 axes; got the shape \(2, 4\)"),
    ("rotary_embedding", [a(3, 2, 4), a(2), a(2)], a(3, 2, 4), {}, r"cos with at least 2 axes; got the shape \(2\)"),
    ("rotary_embedding", [a(3, 2, 4), a(3, 2), a(3, 2)], a(3, 2, 5), {}, r"a result of the type of x"),
    ("rotary_embedding", [a(3, 2, 4), a(3, 2, dtype=BF16), a(3, 2)], a(3, 2, 4), {}, r"cos of float32"),
    ("rotary_embedding", [a(3, 2, 4), a(3, 2), i32(3, 2)], a(3, 2, 4), {}, r"sin of float32"),
    ("rotary_embedding", [a(3, 2, 4), a(2, 2), a(2, 2)], a(3, 2, 4), {}, ROTARY),
    ("rotary_embedding", [a(3, 2, 5), a(3, 2), a(3, 2)], a(3, 2, 5), {}, ROTARY),
    ("rotary_embedding", [a(3, 2, 4), a(3, 2), a(3, 1)], a(3, 2, 4), {}, ROTARY),
    ("rotary_embedding", [a(2, 3, 2, 4), a(5, 3, 2), a(5, 3, 2)], a(2, 3, 2, 4), {}, ROTARY),
    ("rotary_embedding", [a(3, 2, 4), a(2, 3, 2), a(2, 3, 2)], a(3, 2, 4), {}, ROTARY),
    ("rotary_embedding", [i32(3, 2, 4), a(3, 2), a(3, 2)], i32(3, 2, 4), {}, r"arrays of float32, bfloat16 or float16"),
    (
        "rotary_embedding_backward",
        [a(3, 2, 4), a(3, 2), a(3, 2), a(3, 2, 4), a(3, 2, 5)],
        [a(3, 2, 4), a(3, 2), a(3, 2)],
        TABLE,
        r"a cotangent of the type of x",
    ),
    (
        "rotary_embedding_backward",
        [a(3, 2, 4), a(3, 2), a(3, 2), a(3, 2, 4), a(3, 2, 4)],
        [a(3, 2, 4), a(3, 2), a(2, 2)],
        TABLE,
        OF_TYPES + r"\(2, 2\) for \(3, 2\)",
    ),
    (
        "rotary_embedding_backward",
        [a(3, 2, 4), a(2, 2), a(2, 2), a(3, 2, 4), a(3, 2, 4)],
        [a(3, 2, 4), a(2, 2), a(2, 2)],
        TABLE,
        r"expected cos and sin of shape",
    ),
    (
        "rotary_embedding_backward",
        ROTARY_BACKWARD,
        a(3, 2),
        {"needs_grad": np.int64(8)},
        r"to be a mask of 3 bits; got 8",
    ),
    ("rotary_embedding_backward", ROTARY_BACKWARD, a(3, 2), TABLE, r"3 results, one for each operand in the mask"),
    _append(message=r"the results in the memory of the caches"),
    _append((0, a(3, 4)), message=r"qkv with at least 3 axes"),
    _append((0, a(2, 4, 4)), message=r"that fits into the caches of shape \(5, 1, 4\); got \(2, 4, 4\)"),
    _append((0, a(6, 3, 4)), message=r"that fits into the caches"),
    _append((0, a(2, 2, 3, 4)), message=r"that fits into the caches"),
    _append((0, a(2, 3, 4, dtype=BF16)), message=r"caches of one type, that of qkv"),
    _append((4, a(6, 1, 4)), message=r"caches of one type"),
    _append(results=[a(2, 1, 4), a(5, 1, 4), a(6, 1, 4)], message=r"and results of these types"),
    _append(results=[a(2, 2, 4), *APPENDED[1:]], message=r"that fits into the caches"),
    _append((1, a(3, 2)), message=r"cos and sin of shape"),
    _append((5, a()), message=r"position of int32"),
    _append((5, i32(2)), message=r"a position for each cache; got the shape \(2\)"),
]
