"""Rotary position embedding."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._precision import wide


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
