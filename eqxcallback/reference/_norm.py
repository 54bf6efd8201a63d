"""Normalisation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._precision import wide


def rms_norm(x: Float[Array, "*batch size"], weight: Float[Array, " size"] | None = None, *, eps: float) -> Array:
    y = x.astype(wide(x.dtype))
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * jnp.broadcast_to(weight.astype(y.dtype), y.shape)
    return y.astype(x.dtype)
