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


def layer_norm(
    x: Float[Array, "*batch size"],
    weight: Float[Array, " size"] | None = None,
    bias: Float[Array, " size"] | None = None,
    *,
    eps: float,
) -> Array:
    y = x.astype(wide(x.dtype))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    if weight is not None:
        y = y * jnp.broadcast_to(weight.astype(y.dtype), y.shape)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
    return y.astype(x.dtype)
