"""Rotary position embedding."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._precision import wide
from .._reference_append import append


def rotary_embedding(
    x: Float[Array, "*batch rows heads size"], cos: Float[Array, "..."], sin: Float[Array, "..."]
) -> Array:
    """`cos`, `sin`: `(*batch, rows, size / 2)`, or without the batch axes."""
    dtype = wide(x.dtype)
    a, b = jnp.split(x.astype(dtype), 2, axis=-1)
    c, s = (jnp.broadcast_to(table[..., None, :].astype(dtype), a.shape) for table in _with_batch(x, cos, sin))
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1).astype(x.dtype)


def _with_batch(x: Array, *tables: Array) -> list[Array]:
    return [table.reshape((1,) * (x.ndim - 1 - table.ndim) + table.shape) for table in tables]


def rotary_append(
    qkv: Array, table: tuple[Array, Array], k_cache: Array, v_cache: Array, position: Array
) -> tuple[Array, Array, Array]:
    """`qkv`: `(*batch, rows, heads + 2 * kv_heads, size)`; the caches: `(*batch, length, kv_heads, size)`."""
    kv_heads = k_cache.shape[-2]
    heads = qkv.shape[-2] - 2 * kv_heads
    qk, v = jnp.split(qkv, [heads + kv_heads], axis=-2)
    q, k = jnp.split(rotary_embedding(qk, *table), [heads], axis=-2)
    k_cache, v_cache = (append(x, new, position, row_rank=2) for x, new in ((k_cache, k), (v_cache, v)))
    return q, k_cache, v_cache
