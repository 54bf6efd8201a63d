"""Rotation by position: operands, what the reference says of them, and which tests take which."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from eqxcallback import ops
from eqxcallback.ops.rotary import _reference as reference

from ..table import BATCHES, STREAMED, Case, Row, normal, python, row, rows


def rotary_embedding(dtype: Any, shape: Any, shared: bool = False) -> Case:
    length, half = shape[-3], shape[-1] // 2
    angles = normal(2, (length, half) if shared else (*shape[:-2], half))
    args = (normal(1, shape, dtype), np.cos(angles), np.sin(angles))
    return Case(ops.rotary_embedding, reference.rotary_embedding, args, 2)


def of_model(model: Any) -> Iterator[Row]:
    yield row(rotary_embedding, (5, model.heads, model.head_size), True, tags=())


def _rotation(dtype: Any, *shape: int, batch: Any = None) -> Any:
    """With a table of the dtype, for each example or for the examples of `batch`."""
    angles = normal(0, (*shape[:-2], shape[-1] // 2) if batch is None else (*batch, shape[-3], shape[-1] // 2))
    return [normal(0, shape, dtype), np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)]


CASES = [
    *rows(
        rotary_embedding,
        [
            *[((*batch, 3, 2, size), shared) for batch in BATCHES for size, shared in ((2, True), (34, False))],
            *[((1, 1, size),) for size in (0, 6, 16, 32, 126, 200)],
            ((0, 2, 4),),
            ((0, 3, 2, 4), True),
            ((3, 0, 4),),
        ],
        "edge",
    ),
    row(rotary_embedding, (2, 501, 9, 126), True, tags=("large", "large gradient")),
    row(rotary_embedding, (2, 5, 2, 34), tags=["written"]),
    *rows(rotary_embedding, [((length, 1, size),) for length, size in STREAMED], "streamed"),
    *rows(
        rotary_embedding,
        [((*batch, 3, 2, size), shared) for batch, size in (((), 2), ((4,), 34), ((2, 3), 6)) for shared in (0, 1)],
        "gradient",
    ),
    row(rotary_embedding, (3, 2, 4), tags=("mapped", "derived"), name="rotary_embedding"),
    row(rotary_embedding, (2, 3, 2, 4), tags=["mapped"], name="rotary_embedding of a batch"),
    row(rotary_embedding, (2, 3, 2, 4), True, tags=["mapped"], name="rotary_embedding of a batch with one table"),
    row(rotary_embedding, (2, 2, 3, 2, 4), True, tags=["mapped"], name="rotary_embedding of batches with one table"),
    # Packs, no packs, more heads than a thread has, one table for the examples of a batch.
    *rows(
        rotary_embedding,
        [
            *[((3, 2, 2),), ((1, 3, 128),)],
            *[(shape, True) for shape in ((2, 2, 5, 32), (2, 3, 9, 12), (3, 2, 1, 18))],
        ],
        "cuda",
    ),
    *rows(rotary_embedding, [((2, 1024, 32, 128),), ((2, 1024, 9, 64), True)], "model"),
    python("rotary_embedding", ops.rotary_embedding, lambda d: _rotation(d, 2, 3, 5, 6), "python mapped"),
    python(
        "rotary_embedding of one table",
        ops.rotary_embedding,
        lambda d: _rotation(d, 4, 2, 3, 5, 6, batch=()),
        "python mapped",
    ),
]
