"""Rows written into a cache, in place."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Int

from .. import kernels, reference
from .._checks import check, integers
from ..kernel import NativeKernel
from ..kernels import host
from ..op import Implementation, Op


_cache_append = Op(
    "cache_append",
    kernels={"cpu": NativeKernel("cache_append", aliases={"cache": 0}), "cuda": kernels.CACHE_APPEND},
    reference=reference.cache_append,
    batching={"rows": "batched", "position": "either"},
    alternatives={"cpu": (host.CACHE_APPEND,), "cuda": (host.CACHE_APPEND,)},
)


def cache_append(
    cache: Array,
    rows: Array,
    position: Int[ArrayLike, "*batch"],
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
    check(cache.ndim > batch_dims >= 0, name, f"cache to have a length after its {batch_dims} batch axes", cache=cache)
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
    # The kernel copies bytes: elements of less than one, and typed PRNG keys, which hide an axis, are none.
    op = _cache_append.using("auto" if implementation == "reference" else implementation)
    append = op if _has_bytes(cache.dtype) and implementation != "reference" else reference.cache_append
    return append(cache, rows, start, row_rank=cache.ndim - batch_dims - 1)


def _has_bytes(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits >= 8
    return not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits >= 8
