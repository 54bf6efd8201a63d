"""Softmax."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._precision import wide


def softmax(
    x: Float[Array, "*batch size"], mask: Bool[Array, "..."] | None = None, *, scale: float
) -> Float[Array, "*batch size"]:
    """`mask`: of the last axes of `x`."""
    y = x.astype(wide(x.dtype))
    y = -y if scale < 0 else y
    taking = jnp.ones_like(y, bool) if mask is None else jnp.broadcast_to(mask, y.shape)
    # The result does not depend on what is subtracted: so it needs no derivative.
    highest = jnp.max(jax.lax.stop_gradient(y), axis=-1, keepdims=True, initial=-jnp.inf, where=taking)
    some = jnp.any(taking, axis=-1, keepdims=True)
    highest = jnp.where(some, highest, 0.0)
    # What does not take part has no gradient, not even where it is NaN.
    y = jnp.where(taking, y, jnp.zeros_like(y)) - jnp.where(taking, highest, jnp.zeros_like(y))
    powers = jnp.where(taking, jnp.exp(abs(scale) * y), 0.0)
    total = jnp.where(some, jnp.sum(powers, axis=-1, keepdims=True), 1.0)
    return jnp.where(taking, powers / total, 0.0).astype(x.dtype)
