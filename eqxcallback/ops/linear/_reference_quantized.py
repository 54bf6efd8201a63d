"""Weights in GGUF blocks: 32 of one row share a scale."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, UInt8

from ._reference_activations import quantize_activations
from ._reference_encodings import decode


def dequantize(blocks: UInt8[Array, "*rows bytes"], *, encoding: str) -> Float[Array, "*rows features"]:
    """The weights in f32: see `eqxcallback.ops.dequantize`."""
    return decode(blocks, encoding)


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
