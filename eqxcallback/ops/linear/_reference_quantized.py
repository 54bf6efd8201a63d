"""Weights in GGUF blocks: 32 of one row share a scale."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8

from ._reference_activations import quantize_activations


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
    x: Float[Array, "*batch in_features"],
    blocks: UInt8[Array, "out_features bytes"],
    *,
    encoding: str,
    activations: str = "exact",
) -> Float[Array, "*batch out_features"]:
    wide = x.astype(jnp.float32)
    if activations == "int8":
        wide = quantize_activations(wide, 32)
    weights = dequantize(blocks, encoding=encoding)
    return jnp.matmul(wide, weights.T, precision=jax.lax.Precision.HIGHEST).astype(x.dtype)


def _half(pair: UInt8[Array, "*rows 2"]) -> Float[Array, "*rows"]:
    return jax.lax.bitcast_convert_type(pair, jnp.float16).astype(jnp.float32)


_LARGEST_HALF = 65504.0


def quantize(weight: Float[Array, "*rows features"], *, encoding: str) -> UInt8[Array, "*rows bytes"]:
    """Digits are those of the scale as it is stored, in f16: so they are off by half a step at most."""
    *rows, features = weight.shape
    parts = weight.astype(jnp.float32).reshape(*rows, features // 32, 32)
    if encoding == "Q4_1":
        minimum = _rounded(jnp.min(parts, axis=-1, keepdims=True))
        scale = _rounded((jnp.max(parts, axis=-1, keepdims=True) - minimum) / 15)
        digits = jnp.clip(_digits(parts - minimum, scale), 0, 15).astype(jnp.uint8)
        low, high = jnp.split(digits, 2, axis=-1)
        fields = [_bytes(scale), _bytes(minimum), low | (high << 4)]
    else:
        scale = _rounded(jnp.max(jnp.abs(parts), axis=-1, keepdims=True) / 127)
        digits = jnp.clip(_digits(parts, scale), -127, 127).astype(jnp.int8)
        fields = [_bytes(scale), jax.lax.bitcast_convert_type(digits, jnp.uint8)]
    blocks = jnp.concatenate(fields, axis=-1)
    return blocks.reshape(*rows, features // 32 * blocks.shape[-1])


def quantize_int8(
    weight: Float[Array, "out_features in_features"],
) -> tuple[Int8[Array, "out_features in_features"], Float[Array, " out_features"]]:
    wide = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True, initial=0.0) / 127
    digits = jnp.clip(_digits(wide, scale), -127, 127)
    return digits.astype(jnp.int8), scale[:, 0]


def _digits(x: Array, scale: Array) -> Array:
    """A block of zeros has no scale."""
    return jnp.round(x / jnp.where(scale == 0, 1.0, scale))


def _rounded(x: Array) -> Array:
    return jnp.clip(x, -_LARGEST_HALF, _LARGEST_HALF).astype(jnp.float16).astype(jnp.float32)


def _bytes(x: Float[Array, "*rows 1"]) -> UInt8[Array, "*rows 2"]:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float16)[..., 0], jnp.uint8)
