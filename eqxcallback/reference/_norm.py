"""Normalisation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*batch size"], weight: Float[Array, " size"] | None = None, *, eps: float) -> Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * jnp.broadcast_to(weight.astype(wide.dtype), y.shape)
    return y.astype(x.dtype)
