"""A linear layer over weights in int8, with a scale for each output feature."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from ._precision import wide
from ._rounding import rounded


def int8_linear(
    x: Float[Array, "*batch in_features"],
    weight: Int8[Array, "out_features in_features"],
    scale: Float[Array, " out_features"],
) -> Float[Array, "*batch out_features"]:
    dtype = wide(x.dtype)
    out = jnp.einsum("...i,oi->...o", x.astype(dtype), weight.astype(dtype), precision=jax.lax.Precision.HIGHEST)
    return (out * jnp.broadcast_to(scale.astype(dtype), out.shape)).astype(x.dtype)


def rounded_int8_linear(
    x: Float[Array, "*batch in_features"],
    weight: Int8[Array, "out_features in_features"],
    scale: Float[Array, " out_features"],
) -> Float[Array, "*batch out_features"]:
    return int8_linear(rounded(x.astype(wide(x.dtype)), x.shape[-1]), weight, scale).astype(x.dtype)
