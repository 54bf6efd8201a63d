"""Rows appended to a cache: operands, what the reference says of them, and which tests take which."""

from typing import Any

import numpy as np

from eqxcallback import ops
from eqxcallback.ops.cache import _reference as reference

from ..table import BATCHES, Case, floats, normal, python, row, rows, with_options


def cache_append(dtype: Any, batch: Any, length: int, count: int, shape: Any, positions: Any = None) -> Case:
    """`count` rows of this shape."""
    positions = (
        np.random.default_rng(4).integers(-2, length + 2, batch)
        if positions is None
        else np.broadcast_to(positions, batch)
    )
    args = (
        normal(1, (*batch, length, *shape), dtype),
        normal(2, (*batch, count, *shape), dtype),
        np.asarray(positions, np.int32),
    )
    op = with_options(ops.cache_append, batch_dims=len(batch))
    return Case(op, with_options(reference.cache_append, row_rank=len(shape)), args, 0)


# Of two rows in nine: those that do not fit are clamped.
_POSITIONS = [-(2**31), -1, 0, 6, 7, 8, 2**31 - 1]
CASES = [
    *rows(
        cache_append,
        [
            *[(batch, 7, n, shape) for batch in BATCHES for n, shape in ((0, (3,)), (1, ()), (3, (2, 5)), (7, (3,)))],
            *[((), 9, 2, (3,), position) for position in _POSITIONS],
            ((0,), 3, 1, (2,)),
            ((2,), 0, 0, (2,)),
            ((2,), 3, 1, (0,)),
        ],
        "edge",
    ),
    row(cache_append, (2,), 61, 3, (5,), tags=["written"]),
    row(cache_append, (), 5, 2, (3,), 2, tags=("mapped", "derived"), name="cache_append"),
    row(cache_append, (2,), 5, 2, (3,), (1, 3), tags=["mapped"], name="cache_append to a batch"),
    *rows(
        cache_append,
        [
            *[((batch,), 7, n, shape) for batch in (1, 3) for n, shape in ((0, (3,)), (1, ()), (3, (2, 5)), (7, (8,)))],
            *[((2,), 9, 2, (3,), position) for position in _POSITIONS],
        ],
        "cuda",
    ),
    *rows(cache_append, [((8,), 4096, 1, (8, 128)), ((2,), 1000, 37, (3, 64))], "model"),
    python(
        "cache_append",
        with_options(ops.cache_append, batch_dims=1),
        lambda d: [*floats(d, (3, 7, 2, 5), (3, 4, 2, 5)), np.array([-3, 2, 6], np.int32)],
        "python mapped",
    ),
    python(
        "cache_append of scalars",
        ops.cache_append,
        lambda d: [*floats(d, (7,), (3,)), np.int32(1)],
        "python mapped",
    ),
]
