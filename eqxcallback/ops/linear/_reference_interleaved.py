"""The places of bytes in blocks of 16 rows side by side."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8


ROWS = 16
"""So many rows are side by side."""


class Block(NamedTuple):
    """The bytes of a block of one row. It begins with halves, a scale and perhaps a minimum; of the others four are together."""

    size: int
    head: int


BLOCKS = {"Q4_1": Block(20, 4), "Q8_0": Block(34, 2)}
_HALF, _FOUR = 2, 4


@functools.partial(jax.jit, static_argnames="block")
def interleave(blocks: UInt8[Array, "*layers rows bytes"], block: Block) -> UInt8[Array, "*layers rows bytes"]:
    """Compiled: as operations of their own, each would be a copy."""
    *layers, rows, size = blocks.shape
    groups = blocks.reshape(*layers, rows // ROWS, ROWS, size // block.size, block.size)
    parts = (groups[..., : block.head], _HALF), (groups[..., block.head :], _FOUR)
    by_row = [part.reshape(*part.shape[:-1], part.shape[-1] // unit, unit) for part, unit in parts]
    by_unit = [jnp.moveaxis(part, -4, -2) for part in by_row]  # [..., block, unit, row, byte]
    return jnp.concatenate([_flat(part, 3) for part in by_unit], axis=-1).reshape(blocks.shape)


@functools.partial(jax.jit, static_argnames="block")
def deinterleave(blocks: UInt8[Array, "*layers rows bytes"], block: Block) -> UInt8[Array, "*layers rows bytes"]:
    *layers, rows, size = blocks.shape
    groups = blocks.reshape(*layers, rows // ROWS, size // block.size, ROWS * block.size)
    parts = (groups[..., : ROWS * block.head], _HALF), (groups[..., ROWS * block.head :], _FOUR)
    by_unit = [part.reshape(*part.shape[:-1], part.shape[-1] // (ROWS * unit), ROWS, unit) for part, unit in parts]
    by_row = [jnp.moveaxis(part, -2, -4) for part in by_unit]  # [..., row, block, unit, byte]
    return jnp.concatenate([_flat(part, 2) for part in by_row], axis=-1).reshape(blocks.shape)


def _flat(x: Array, axes: int) -> Array:
    """Join the last axes, whose product is known where other axes may be empty."""
    return x.reshape(*x.shape[:-axes], math.prod(x.shape[-axes:]))
