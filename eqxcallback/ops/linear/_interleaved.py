"""Rows of Q4_1 blocks side by side, so that a vector of the processor has the same bytes of all of them."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8

from ...core import AnyArray, check
from ._reference_interleaved import BLOCK, GROUP, deinterleave, interleave


_LINE = 64  # bytes


def interleave_rows(blocks: UInt8[AnyArray, "*layers rows bytes"]) -> UInt8[Array, "*layers rows bytes"]:
    """`"Q4_1"` blocks as `"Q4_1_R16"`: the same weights, with 16 rows side by side.

    **Arguments:**

    - `blocks`: in `"Q4_1"`, a multiple of 16 rows. Those of NumPy, such as a file's, are put in order before JAX has them:
        nothing is compiled.

    **Returns:** an array of the same shape. Each 16 rows of it are one run of bytes: of each block in turn 16 scales, 16
    minimums, four bytes of each row, the next four of each row, and so on.
    """
    if isinstance(blocks, np.ndarray):
        check_groups("interleave_rows", blocks, "Q4_1")
        return jax.device_put(_interleave(blocks))
    blocks = jnp.asarray(blocks)
    check_groups("interleave_rows", blocks, "Q4_1")
    return interleave(blocks)


def deinterleave_rows(blocks: UInt8[AnyArray, "*layers rows bytes"]) -> UInt8[Array, "*layers rows bytes"]:
    """`"Q4_1_R16"` blocks as `"Q4_1"`: undoes [`eqxcallback.ops.interleave_rows`][], bit by bit.

    **Arguments:**

    - `blocks`: in `"Q4_1_R16"`.

    **Returns:** an array of the same shape.
    """
    blocks = jnp.asarray(blocks)
    check_groups("deinterleave_rows", blocks, "Q4_1_R16")
    return deinterleave(blocks)


def check_groups(who: str, blocks: Array | np.ndarray, encoding: str) -> None:
    """Raise a `ValueError` unless `blocks` can be rows side by side."""
    fits = blocks.dtype == jnp.uint8 and blocks.ndim >= 2 and blocks.shape[-1] % BLOCK == 0
    expected = f"uint8 blocks of a multiple of {GROUP} rows, with a multiple of {BLOCK} bytes in each ({encoding})"
    check(fits and blocks.shape[-2] % GROUP == 0, who, expected, blocks=blocks)


def _interleave(blocks: np.ndarray) -> np.ndarray:
    """`interleave` in NumPy. The result begins where a cache line does, as XLA's arrays do: kernels read whole lines."""
    count = blocks.shape[-1] // BLOCK
    memory = np.empty(blocks.size + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    out = memory[start : start + blocks.size].reshape(blocks.shape)
    rows = np.ascontiguousarray(blocks)
    for dtype, first, last in ((np.uint16, 0, 2), (np.uint32, 1, 5)):  # the head, as halves, and what follows, as words
        size = np.dtype(dtype).itemsize
        source = rows.view(dtype).reshape(-1, GROUP, count, BLOCK // size)
        target = out.view(dtype).reshape(-1, count, BLOCK // size, GROUP)
        target[:, :, first:last] = source[..., first:last].transpose(0, 2, 3, 1)
    return out
