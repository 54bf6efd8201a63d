"""Rotary position embedding."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def rotary_embedding(
    x: Float[Array, "*batch rows heads size"], cos: Float[Array, "..."], sin: Float[Array, "..."]
) -> Array:
    """`cos`, `sin`: `(*batch, rows, size / 2)`, or without the batch axes."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    a, b = jnp.split(wide, 2, axis=-1)
    c, s = (jnp.broadcast_to(table[..., None, :].astype(wide.dtype), a.shape) for table in _with_batch(x, cos, sin))
    return jnp.concatenate([a * c - b * s, b * c + a * s], axis=-1).astype(x.dtype)


def _with_batch(x: Array, *tables: Array) -> list[Array]:
    return [table.reshape((1,) * (x.ndim - 1 - table.ndim) + table.shape) for table in tables]
