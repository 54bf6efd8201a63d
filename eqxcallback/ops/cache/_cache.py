"""Rows written into a cache, in place."""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Integer

from ...core import AnyArray, ShapeAndDtype, check, integer, integers
from ...kernel import NativeKernel
from ...transform import Implementation, Op
from . import _cuda, _numpy, _reference


# Both copy bytes, whatever they mean, and so support the same elements.
_NATIVE = NativeKernel("cache_append", aliases={"cache": 0}, supports=_cuda.CACHE_APPEND.supports)


def _sharding(cache: ShapeAndDtype, rows: ShapeAndDtype, position: ShapeAndDtype, *, row_rank: int) -> str:
    """All but the length."""
    row = " ".join(["_", *(f"row{i}" for i in range(row_rank))])
    return f"... {row}, ... {row}, ... -> ... {row}"


_cache_append = Op(
    "cache_append",
    kernels={"cpu": (_NATIVE, _numpy.CACHE_APPEND), "cuda": (_cuda.CACHE_APPEND, _numpy.CACHE_APPEND)},
    reference=_reference.cache_append,
    vmap_method={"cache": "broadcast_all", "rows": "broadcast_all", "position": "fold"},
    sharding=_sharding,
)


def cache_append(
    cache: AnyArray,
    rows: AnyArray,
    position: Integer[ArrayLike, "*batch"],
    *,
    batch_dims: int = 0,
    implementation: Implementation = "auto",
) -> Array:
    """`cache` with `rows` from `position` on, written in place where XLA lets it.

    That is the case for a cache that is donated to the enclosing `jax.jit`, or carried by a loop in it, and that nobody uses
    afterwards; else XLA copies it first.

    **Arguments:**

    - `cache`: of shape `(*batch, length, *row)`, of any dtype.
    - `rows`: of shape `(*batch, count, *row)`, of the same dtype, `count <= length`.
    - `position`: where the first row goes, int32 of shape `batch` or `()`. Clamped, a negative one to 0, so that all rows fit.
    - `batch_dims`: the number of batch axes.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of the shape and dtype of `cache`.
    """
    name = "cache_append"
    cache, rows = jnp.asarray(cache), jnp.asarray(rows)
    batch_dims = integer(name, "batch_dims to be an integer of at least 0", batch_dims, least=0)
    check(cache.ndim > batch_dims, name, f"cache to have a length after its {batch_dims} batch axes", cache=cache)
    batch = cache.shape[:batch_dims]
    fits = (
        rows.ndim == cache.ndim
        and rows.dtype == cache.dtype
        and rows.shape[:batch_dims] == batch
        and rows.shape[batch_dims + 1 :] == cache.shape[batch_dims + 1 :]
        and rows.shape[batch_dims] <= cache.shape[batch_dims]
    )
    check(fits, name, "rows of the dtype and shape of cache, and not more of them than it has", rows=rows, cache=cache)
    start = integers(name, "position", position, batch)
    return _cache_append.using(implementation)(cache, rows, start, row_rank=cache.ndim - batch_dims - 1)
