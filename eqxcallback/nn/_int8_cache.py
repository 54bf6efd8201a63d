"""Keys and values in 8 bits, with a scale for each token and head."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8


def quantized(
    x: Float[Array, "count kv_heads size"],
) -> tuple[Int8[Array, "count kv_heads size"], Float[Array, "count kv_heads"]]:
    """`x` as integers from -127 to 127, and their scales: each value errs by at most half a scale."""
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1, initial=0.0) / 127
    steps = jnp.round(wide / jnp.where(scale == 0, 1.0, scale)[..., None])
    return jnp.clip(steps, -127, 127).astype(jnp.int8), scale


def dequantized(x: Int8[Array, "count kv_heads size"], scale: Float[Array, "count kv_heads"]) -> Array:
    return x.astype(jnp.float32) * scale[..., None]
