"""The encodings of GGUF blocks: what their bytes stand for.

All products are exact in f32, so that no compiler that joins them with sums changes anything.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from ._reference_interleaved import BLOCKS, deinterleave


class Layout(NamedTuple):
    """The sizes of a block, the function that decodes blocks along the last axis, and the one that separates rows before it."""

    weights: int
    bytes: int
    decode: Callable[[Array], Array]
    separate: Callable[[Array], Array] = lambda blocks: blocks


def decode(blocks: UInt8[Array, "*rows bytes"], encoding: str) -> Float[Array, "*rows features"]:
    """The weights in f32."""
    layout = LAYOUTS[encoding]
    blocks = layout.separate(blocks)
    *rows, size = blocks.shape
    values = layout.decode(blocks.reshape(*rows, size // layout.bytes, layout.bytes))
    return values.reshape(*rows, math.prod(values.shape[len(rows) :]))


def _half(pair: UInt8[Array, "*rows 2"]) -> Float[Array, "*rows 1"]:
    return jax.lax.bitcast_convert_type(pair, jnp.float16).astype(jnp.float32)[..., None]


def _int8(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.int8).astype(jnp.float32)


def _nibbles(packed: Array) -> Array:
    """The low halves of all bytes, and then the high ones."""
    return jnp.concatenate([packed & 15, packed >> 4], axis=-1)


def _fives(high: Array, packed: Array) -> Array:
    """Nibbles with a fifth bit, 32 of which are in four bytes."""
    bits = jnp.stack([high >> i & 1 for i in range(8)], axis=-1)
    return _nibbles(packed) | bits.reshape(*high.shape[:-1], 32) << 4


def _q4_0(x: Array) -> Array:
    return (_nibbles(x[..., 2:]).astype(jnp.float32) - 8) * _half(x[..., :2])


def _q4_1(x: Array) -> Array:
    return _nibbles(x[..., 4:]).astype(jnp.float32) * _half(x[..., :2]) + _half(x[..., 2:4])


def _q5_0(x: Array) -> Array:
    return (_fives(x[..., 2:6], x[..., 6:]).astype(jnp.float32) - 16) * _half(x[..., :2])


def _q5_1(x: Array) -> Array:
    return _fives(x[..., 4:8], x[..., 8:]).astype(jnp.float32) * _half(x[..., :2]) + _half(x[..., 2:4])


def _q8_0(x: Array) -> Array:
    return _int8(x[..., 2:]) * _half(x[..., :2])


def _of_eight(x: Array, digits: Array) -> Array:
    """Weights of eight sub-blocks, whose scales and minimums have 6 bits and follow two halves that multiply them."""
    low, middle, high = jnp.split(x[..., 4:16], 3, axis=-1)
    scales = jnp.concatenate([low & 63, high & 15 | low >> 2 & 48], axis=-1).astype(jnp.float32)
    minimums = jnp.concatenate([middle & 63, high >> 4 | middle >> 2 & 48], axis=-1).astype(jnp.float32)
    scales, minimums = scales * _half(x[..., :2]), minimums * _half(x[..., 2:4])
    return digits.astype(jnp.float32) * scales[..., None] - minimums[..., None]


def _pairs_of_nibbles(packed: Array, size: int) -> Array:
    """Sub-blocks of 32: the low halves of `size` bytes, then the high ones, and so on."""
    *rows, count = packed.shape
    parts = packed.reshape(*rows, count // size, size)
    return jnp.stack([parts & 15, parts >> 4], axis=-2).reshape(*rows, 8, 32)


def _q4_k(x: Array) -> Array:
    return _of_eight(x, _pairs_of_nibbles(x[..., 16:], 32))


def _q5_k(x: Array) -> Array:
    bits = jnp.stack([x[..., 16:48] >> i & 1 for i in range(8)], axis=-2)
    return _of_eight(x, _pairs_of_nibbles(x[..., 48:], 32) | bits << 4)


def _q6_k(x: Array) -> Array:
    *rows, _ = x.shape
    high = x[..., 128:192].reshape(*rows, 2, 32)
    high = jnp.stack([high >> i & 3 for i in (0, 2, 4, 6)], axis=-2).reshape(*rows, 8, 32)
    digits = (_pairs_of_nibbles(x[..., :128], 64) | high << 4).astype(jnp.float32) - 32
    scales = _int8(x[..., 192:208]) * _half(x[..., 208:])
    return digits.reshape(*rows, 16, 16) * scales[..., None]


LAYOUTS: Mapping[str, Layout] = {
    "Q4_0": Layout(32, 18, _q4_0),
    "Q4_1": Layout(32, 20, _q4_1),
    "Q5_0": Layout(32, 22, _q5_0),
    "Q5_1": Layout(32, 24, _q5_1),
    "Q8_0": Layout(32, 34, _q8_0),
    "Q4_K": Layout(256, 144, _q4_k),
    "Q5_K": Layout(256, 176, _q5_k),
    "Q6_K": Layout(256, 210, _q6_k),
    "Q4_1_R16": Layout(32, 20, _q4_1, functools.partial(deinterleave, block=BLOCKS["Q4_1"])),
    "Q8_0_R16": Layout(32, 34, _q8_0, functools.partial(deinterleave, block=BLOCKS["Q8_0"])),
}
