"""The places of bytes in Q4_1 blocks of 16 rows side by side."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8


GROUP = 16
"""So many rows are side by side."""
BLOCK = 20
"""Bytes of a block of one row: a scale and a minimum, of two bytes each, and 16 bytes, of which four are together."""

_HEAD, _HALF, _FOUR = 4, 2, 4


@jax.jit
def interleave(blocks: UInt8[Array, "*layers rows bytes"]) -> UInt8[Array, "*layers rows bytes"]:
    """Compiled: as operations of their own, each would be a copy."""
    *layers, rows, size = blocks.shape
    groups = blocks.reshape(*layers, rows // GROUP, GROUP, size // BLOCK, BLOCK)
    parts = (groups[..., :_HEAD], _HALF), (groups[..., _HEAD:], _FOUR)
    by_row = [part.reshape(*part.shape[:-1], part.shape[-1] // unit, unit) for part, unit in parts]
    by_unit = [jnp.moveaxis(part, -4, -2) for part in by_row]  # [..., block, unit, row, byte]
    return jnp.concatenate([_flat(part, 3) for part in by_unit], axis=-1).reshape(blocks.shape)


@jax.jit
def deinterleave(blocks: UInt8[Array, "*layers rows bytes"]) -> UInt8[Array, "*layers rows bytes"]:
    *layers, rows, size = blocks.shape
    groups = blocks.reshape(*layers, rows // GROUP, size // BLOCK, GROUP * BLOCK)
    parts = (groups[..., : GROUP * _HEAD], _HALF), (groups[..., GROUP * _HEAD :], _FOUR)
    by_unit = [part.reshape(*part.shape[:-1], part.shape[-1] // (GROUP * unit), GROUP, unit) for part, unit in parts]
    by_row = [jnp.moveaxis(part, -2, -4) for part in by_unit]  # [..., row, block, unit, byte]
    return jnp.concatenate([_flat(part, 2) for part in by_row], axis=-1).reshape(blocks.shape)


def _flat(x: Array, axes: int) -> Array:
    """Join the last axes, whose product is known where other axes may be empty."""
    return x.reshape(*x.shape[:-axes], math.prod(x.shape[-axes:]))
