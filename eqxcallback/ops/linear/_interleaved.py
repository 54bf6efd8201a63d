"""Rows of Q4_1 blocks side by side, so that a vector of the processor has the same bytes of all of them."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8

from ...core import AnyArray, check


GROUP = 16
"""So many rows are side by side."""

# Of a block of one row: scale and minimum, and its weights, four bytes at a time.
_BLOCK, _HEAD, _WORD, _FOUR = 20, 4, 2, 4


def interleave_rows(blocks: UInt8[AnyArray, "*layers rows bytes"]) -> UInt8[Array, "*layers rows bytes"]:
    """`"Q4_1"` blocks as `"Q4_1_R16"`: the same weights, with 16 rows side by side.

    **Arguments:**

    - `blocks`: in `"Q4_1"`, a multiple of 16 rows.

    **Returns:** an array of the same shape. Each 16 rows of it are one run of bytes: of each block in turn 16 scales, 16
    minimums, four bytes of each row, the next four of each row, and so on.
    """
    blocks = jnp.asarray(blocks)
    check_groups("interleave_rows", blocks, "Q4_1")
    return _interleave(blocks)


def deinterleave_rows(blocks: UInt8[AnyArray, "*layers rows bytes"]) -> UInt8[Array, "*layers rows bytes"]:
    """`"Q4_1_R16"` blocks as `"Q4_1"`: what [`eqxcallback.ops.interleave_rows`][] undoes, bit by bit."""
    blocks = jnp.asarray(blocks)
    check_groups("deinterleave_rows", blocks, "Q4_1_R16")
    return _deinterleave(blocks)


@jax.jit
def _interleave(blocks: Array) -> Array:
    *layers, rows, size = blocks.shape
    groups = blocks.reshape(*layers, rows // GROUP, GROUP, size // _BLOCK, _BLOCK)
    parts = (groups[..., :_HEAD], _WORD), (groups[..., _HEAD:], _FOUR)
    by_row = [part.reshape(*part.shape[:-1], part.shape[-1] // unit, unit) for part, unit in parts]
    by_word = [jnp.moveaxis(part, -4, -2) for part in by_row]  # [..., block, word, row, byte]
    return jnp.concatenate([_flat(part, 3) for part in by_word], axis=-1).reshape(blocks.shape)


@jax.jit
def _deinterleave(blocks: Array) -> Array:
    *layers, rows, size = blocks.shape
    groups = blocks.reshape(*layers, rows // GROUP, size // _BLOCK, GROUP * _BLOCK)
    parts = (groups[..., : GROUP * _HEAD], _WORD), (groups[..., GROUP * _HEAD :], _FOUR)
    by_word = [part.reshape(*part.shape[:-1], part.shape[-1] // (GROUP * unit), GROUP, unit) for part, unit in parts]
    by_row = [jnp.moveaxis(part, -2, -4) for part in by_word]  # [..., row, block, word, byte]
    return jnp.concatenate([_flat(part, 2) for part in by_row], axis=-1).reshape(blocks.shape)


def _flat(x: Array, axes: int) -> Array:
    """Join the last axes, whose sizes are known where others may be zero."""
    return x.reshape(*x.shape[:-axes], math.prod(x.shape[-axes:]))


def check_groups(who: str, blocks: Array, encoding: str) -> None:
    """Raise a `ValueError` unless `blocks` can be rows side by side."""
    fits = blocks.dtype == jnp.uint8 and blocks.ndim >= 2 and blocks.shape[-1] % _BLOCK == 0
    expected = f"uint8 blocks of a multiple of {GROUP} rows, with a multiple of {_BLOCK} bytes in each ({encoding})"
    check(fits and blocks.shape[-2] % GROUP == 0, who, expected, blocks=blocks)
