"""Copies of the memory of buffers, between bands of noise, on which kernels work in checked mode."""

import ctypes
from collections.abc import Sequence

import numpy as np

from .. import _ext


_ALIGNMENT = 64  # as XLA's own memory on a CPU has
_BAND = 1024  # bytes
_NOISE = np.random.default_rng(0).integers(0, 256, (2, _BAND), np.uint8)  # before, after


def memory(buffer: _ext.Buffer) -> np.ndarray:
    """The bytes where `buffer` is, writeable. Of a sub-byte type the packed ones."""
    return _at(buffer._address, buffer.nbytes)


def _at(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)) if size else np.empty(0, np.uint8)


class Guards:
    """Within this context buffers are over copies, with a band of noise on each side. At its end, if nothing was raised, outputs
    are where they were. Buffers over the same memory stay so: an output may overwrite an input.

    Elements of less than a byte are unpacked by NumPy, into memory of its own: those buffers stay.

    **Attributes:**

    - `problems`: after the context, the bands that were overwritten, in words.
    """

    def __init__(self, named: Sequence[tuple[str, _ext.Buffer]]):
        self.problems: list[str] = []
        self._buffers = [(name, buffer) for name, buffer in named if buffer.nbytes and not buffer._packed]
        # By address: whose, and the copy with its bands.
        self._blocks: dict[int, tuple[str, np.ndarray]] = {}

    def __enter__(self) -> "Guards":
        sizes: dict[int, tuple[str, int]] = {}
        for name, buffer in self._buffers:
            first, size = sizes.get(buffer._address, (name, 0))
            sizes[buffer._address] = first, max(size, buffer.nbytes)
        for address, (name, size) in sizes.items():
            block = _aligned(_BAND + size + _BAND)
            block[:_BAND], block[-_BAND:] = _NOISE
            block[_BAND:-_BAND] = _at(address, size)
            self._blocks[address] = name, block
        for _, buffer in self._buffers:
            buffer._address = self._blocks[buffer._address][1].ctypes.data + _BAND
        return self

    def __exit__(self, *error: object) -> None:
        origins = {block.ctypes.data + _BAND: address for address, (_, block) in self._blocks.items()}
        for _, buffer in self._buffers:
            copy, buffer._address = memory(buffer), origins[buffer._address]
            if buffer.writeable and error[0] is None:
                memory(buffer)[...] = copy
        for name, block in self._blocks.values():
            before, after = block[:_BAND] != _NOISE[0], block[-_BAND:] != _NOISE[1]
            for side, changed, nearest in (
                ("before", before, _BAND - int(np.flatnonzero(before)[-1]) if before.any() else 0),
                ("after", after, int(np.argmax(after)) + 1),
            ):
                if changed.any():
                    self.problems.append(
                        f"{name}: {int(changed.sum())} bytes {side} its memory were overwritten, the nearest at {nearest}"
                    )
        self._buffers.clear()  # who is held, looks kept
        self._blocks.clear()


def _aligned(size: int) -> np.ndarray:
    block = np.empty(size + _ALIGNMENT, np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    return block[start : start + size]
