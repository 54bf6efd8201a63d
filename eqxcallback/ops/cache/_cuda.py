"""Rows written into a cache. See cache.cu."""

import math

import jax
import jax.numpy as jnp

from ...core import ShapeAndDtype, Types
from ...kernel import CudaKernel, Launch
from .._cuda import FOLDER, ceil


def _batch(cache: ShapeAndDtype, row_rank: int) -> int:
    return math.prod(cache.shape[: len(cache.shape) - row_rank - 1])


def _row_bytes(cache: ShapeAndDtype, row_rank: int) -> int:
    return math.prod(cache.shape[len(cache.shape) - row_rank :]) * cache.dtype.itemsize


def _length(cache: ShapeAndDtype, row_rank: int) -> int:
    return cache.shape[len(cache.shape) - row_rank - 1]


def _blocks(cache: ShapeAndDtype, rows: ShapeAndDtype, position: ShapeAndDtype, *, row_rank: int) -> int:
    row_bytes = _row_bytes(cache, row_rank)
    unit = next(unit for unit in (16, 4, 1) if row_bytes % unit == 0)
    return ceil(_batch(cache, row_rank) * _length(rows, row_rank) * row_bytes // unit, 256)


def _supports(types: Types, **_: object) -> bool | str:
    """Supports elements of whole bytes, which are copied whatever they mean. Typed PRNG keys hide an axis."""
    dtype = types.cache.dtype
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return f"cache has to be an array of numbers; it is {dtype}"
    if jnp.issubdtype(dtype, jnp.integer):
        bits = jnp.iinfo(dtype).bits
    else:
        bits = jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8
    return True if bits >= 8 else f"elements of cache have to be whole bytes; they are {dtype}"


CACHE_APPEND = CudaKernel(
    FOLDER / "cache" / "cache.cu",
    "eqxcallback::cache_append",
    Launch(grid=_blocks, block=256),
    scalars={
        "batch": ("int64", lambda cache, rows, position, *, row_rank: _batch(cache, row_rank)),
        "position_batch": ("int64", lambda cache, rows, position, *, row_rank: position.size),
        "length": ("int64", lambda cache, rows, position, *, row_rank: _length(cache, row_rank)),
        "count": ("int64", lambda cache, rows, position, *, row_rank: _length(rows, row_rank)),
        "row_bytes": ("int64", lambda cache, rows, position, *, row_rank: _row_bytes(cache, row_rank)),
    },
    aliases={"cache": 0},
    supports=_supports,
)
