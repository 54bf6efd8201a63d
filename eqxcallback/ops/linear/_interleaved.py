"""Rows of blocks side by side, so that a vector of the processor has the same bytes of all of them."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8

from ...core import AnyArray, check, check_one_of
from ._reference_interleaved import BLOCKS, ROWS, Block, deinterleave, interleave


_Separate = Literal["Q4_1", "Q8_0"]
_Interleaved = Literal["Q4_1_R16", "Q8_0_R16"]
INTERLEAVED: dict[_Separate, _Interleaved] = {"Q4_1": "Q4_1_R16", "Q8_0": "Q8_0_R16"}
"""For each encoding whose rows can be put side by side, the encoding that they have then: see
[`eqxcallback.ops.interleave_rows`][]."""
DEINTERLEAVED: dict[_Interleaved, _Separate] = {encoding: separate for separate, encoding in INTERLEAVED.items()}
"""The encodings with rows side by side, and for each the one with rows apart."""
INTERLEAVED_ROWS = ROWS
"""The number of rows that are side by side."""

_LINE = 64  # bytes


def interleave_rows(
    blocks: UInt8[AnyArray, "*layers rows bytes"], *, encoding: _Separate
) -> UInt8[Array, "*layers rows bytes"]:
    """Blocks with 16 rows side by side: the same weights, in `"Q4_1_R16"` or `"Q8_0_R16"`.

    **Arguments:**

    - `blocks`: a multiple of 16 rows. An array of NumPy, such as a file's, is put in order before JAX has it: nothing is
        compiled.
    - `encoding`: of `blocks`, `"Q4_1"` or `"Q8_0"`.

    **Returns:** an array of the same shape. Each 16 rows of it are one run of bytes: of each block in turn 16 scales, 16
    minimums (`"Q4_1"`), four bytes of each row, the next four of each row, and so on.
    """
    check_one_of("interleave_rows", "encoding", encoding, INTERLEAVED)
    if isinstance(blocks, np.ndarray):
        check_groups("interleave_rows", blocks, encoding)
        return jax.device_put(_interleave(blocks, BLOCKS[encoding]))
    blocks = jnp.asarray(blocks)
    check_groups("interleave_rows", blocks, encoding)
    return interleave(blocks, block=BLOCKS[encoding])


def deinterleave_rows(
    blocks: UInt8[AnyArray, "*layers rows bytes"], *, encoding: _Interleaved
) -> UInt8[Array, "*layers rows bytes"]:
    """Blocks with each row apart: undoes [`eqxcallback.ops.interleave_rows`][], bit by bit.

    **Arguments:**

    - `blocks`: with 16 rows side by side.
    - `encoding`: of `blocks`, `"Q4_1_R16"` or `"Q8_0_R16"`.

    **Returns:** an array of the same shape, in `"Q4_1"` or `"Q8_0"`.
    """
    blocks = jnp.asarray(blocks)
    check_one_of("deinterleave_rows", "encoding", encoding, DEINTERLEAVED)
    check_groups("deinterleave_rows", blocks, encoding)
    return deinterleave(blocks, block=BLOCKS[DEINTERLEAVED[encoding]])


def check_groups(who: str, blocks: Array | np.ndarray, encoding: str) -> None:
    """Raise a `ValueError` unless `blocks` can be rows side by side."""
    size = BLOCKS[encoding.removesuffix(f"_R{ROWS}")].size
    fits = blocks.dtype == jnp.uint8 and blocks.ndim >= 2 and blocks.shape[-1] % size == 0
    expected = f"uint8 blocks of a multiple of {ROWS} rows, with a multiple of {size} bytes in each ({encoding})"
    check(fits and blocks.shape[-2] % ROWS == 0, who, expected, blocks=blocks)


def _interleave(blocks: np.ndarray, block: Block) -> np.ndarray:
    """`interleave` in NumPy. The result begins where a cache line does, as XLA's arrays do: kernels read whole lines."""
    groups, count = math.prod(blocks.shape[:-1]) // ROWS, blocks.shape[-1] // block.size
    memory = np.empty(blocks.size + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    out = memory[start : start + blocks.size]
    by_row = np.ascontiguousarray(blocks).reshape(groups, ROWS, count, block.size)
    by_unit = out.reshape(groups, count, ROWS * block.size)
    for dtype, first, last in ((np.uint16, 0, block.head), (np.uint32, block.head, block.size)):
        units = (last - first) // np.dtype(dtype).itemsize
        source = by_row[..., first:last].view(dtype)
        target = by_unit[..., ROWS * first : ROWS * last].view(dtype).reshape(groups, count, units, ROWS)
        target[:] = source.transpose(0, 2, 3, 1)
    return out.reshape(blocks.shape)
