"""Weights in GGUF blocks: 32 of one row share a scale."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from ._rounding import rounded


def dequantize(blocks: UInt8[Array, "*rows bytes"], *, encoding: str) -> Float[Array, "*rows features"]:
    """The weights in f32.

    A `"Q4_1"` block has 20 bytes: a scale `d` and a minimum `m` in f16, and 16 bytes with weight `i`, `d q + m`, in the low
    and weight `16 + i` in the high half of byte `i`. A `"Q8_0"` block has 34: a scale in f16 and 32 int8.
    """
    *rows, size = blocks.shape
    if encoding == "Q4_1":
        parts = blocks.reshape(*rows, size // 20, 20)
        scale, minimum, packed = _half(parts[..., 0:2]), _half(parts[..., 2:4]), parts[..., 4:]
        digits = jnp.concatenate([packed & 15, packed >> 4], axis=-1).astype(jnp.float32)
        values = digits * scale[..., None] + minimum[..., None]
    else:
        parts = blocks.reshape(*rows, size // 34, 34)
        values = (
            jax.lax.bitcast_convert_type(parts[..., 2:], jnp.int8).astype(jnp.float32)
            * _half(parts[..., :2])[..., None]
        )
    return values.reshape(*rows, math.prod(values.shape[-2:]))


def quantized_linear(
    x: Float[Array, "*batch in_features"], blocks: UInt8[Array, "out_features bytes"], *, encoding: str
) -> Float[Array, "*batch out_features"]:
    wide = x.astype(jnp.float32)
    weights = dequantize(blocks, encoding=encoding)
    return jnp.matmul(wide, weights.T, precision=jax.lax.Precision.HIGHEST).astype(x.dtype)


def rounded_quantized_linear(
    x: Float[Array, "*batch in_features"], blocks: UInt8[Array, "out_features bytes"], *, encoding: str
) -> Float[Array, "*batch out_features"]:
    return quantized_linear(rounded(x.astype(jnp.float32), 32), blocks, encoding=encoding).astype(x.dtype)


def _half(pair: UInt8[Array, "*rows 2"]) -> Float[Array, "*rows"]:
    return jax.lax.bitcast_convert_type(pair, jnp.float16).astype(jnp.float32)
