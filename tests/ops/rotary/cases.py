"""Rotation by position: operands, what the reference says of them, and which tests take which."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqxcallback import ops
from eqxcallback.ops.rotary import _reference as reference

from ..table import BATCHES, STREAMED, Case, Row, normal, python, row, rows


def rotary_embedding(dtype: Any, shape: Any, shared: bool = False) -> Case:
    length, half = shape[-3], shape[-1] // 2
    angles = normal(2, (length, half) if shared else (*shape[:-2], half))
    args = (normal(1, shape, dtype), np.cos(angles), np.sin(angles))
    return Case(ops.rotary_embedding, reference.rotary_embedding, args, 2)


def _together(f: Any, qkv: Any, cos: Any, sin: Any, *others: Any) -> Any:
    """The three results as one array."""
    results = f(qkv, cos, sin, *others)
    return jnp.concatenate([jax.lax.collapse(x, x.ndim - 3, x.ndim - 1) for x in results], axis=-2)


def _definition(qkv: Any, cos: Any, sin: Any, *others: Any) -> Any:
    return reference.rotary_append(qkv, (cos, sin), *others)


_append = functools.partial(_together, ops.rotary_append)
_append_definition = functools.partial(_together, _definition)


def rotary_append(
    dtype: Any, batch: Any, count: int, heads: tuple[int, int], size: int, length: int, shared: bool = False
) -> Case:
    """`heads` of queries, and of keys. Some positions are out of range."""
    queries, keys = heads
    angles = normal(2, (count, size // 2) if shared else (*batch, count, size // 2))
    caches = (normal(3, (*batch, length, keys, size), dtype), normal(4, (*batch, length, keys, size), dtype))
    positions = np.random.default_rng(5).integers(-2, length + 2, batch)
    args = (normal(1, (*batch, count, queries + 2 * keys, size), dtype), np.cos(angles), np.sin(angles), *caches)
    return Case(_append, _append_definition, (*args, np.asarray(positions, np.int32)), 2)


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
    *rows(
        rotary_append,
        [
            *[(batch, 3, (4, 2), size, 7, shared) for batch in BATCHES for size, shared in ((2, True), (34, False))],
            *[((), 1, (queries, keys), 16, 5) for queries, keys in ((3, 1), (0, 2), (2, 0))],
            *[((2,), 0, (2, 1), 4, 3), ((0,), 1, (2, 1), 4, 3), ((2,), 3, (2, 1), 0, 3), ((2,), 3, (2, 1), 4, 3)],
        ],
        "edge",
    ),
    row(rotary_append, (), 501, (9, 3), 126, 600, tags=["large"]),
    row(rotary_append, (2,), 3, (2, 1), 34, 61, tags=["written"]),
    row(rotary_append, (), 2, (2, 1), 4, 5, tags=("mapped", "derived"), name="rotary_append"),
    row(rotary_append, (2,), 2, (2, 1), 4, 5, True, tags=["mapped"], name="rotary_append of a batch with one table"),
    *rows(
        rotary_append,
        [((2,), 3, (5, 2), 32, 9), ((3,), 1, (4, 1), 128, 4, True), ((1,), 4, (2, 1), 18, 4)],
        "cuda",
    ),
    *rows(rotary_append, [((8,), 1, (32, 8), 128, 4096), ((2,), 512, (9, 3), 64, 1024, True)], "model"),
    python(
        "rotary_append",
        ops.rotary_append,
        lambda d: [*rotary_append(d, (2,), 3, (4, 2), 6, 7).args],
        "python mapped",
    ),
    python("rotary_embedding", ops.rotary_embedding, lambda d: _rotation(d, 2, 3, 5, 6), "python mapped"),
    python(
        "rotary_embedding of one table",
        ops.rotary_embedding,
        lambda d: _rotation(d, 4, 2, 3, 5, 6, batch=()),
        "python mapped",
    ),
]
