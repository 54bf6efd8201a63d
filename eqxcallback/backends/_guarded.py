"""Memory on which a kernel is emulated: copies, between bands that nobody may write."""

import ctypes

import numpy as np

from ..core import DType


_BAND = 1 << 16  # bytes on each side: what is written beyond them ends the process
_MARK = 0xA5
_ALIGNMENT = 256  # of memory on a GPU


class Guarded:
    """A copy of the memory of an array; without one, of bytes that are NaN.

    **Attributes:**

    - `array`: its elements, in the order of the memory.
    """

    def __init__(self, dtype: DType, size: int, origin: np.ndarray | None = None):
        count = size * np.dtype(dtype).itemsize
        block = np.empty(count + 2 * _BAND + _ALIGNMENT, np.uint8)
        start = -(block.ctypes.data + _BAND) % _ALIGNMENT
        self._before = block[start : start + _BAND]
        self._inner = block[start + _BAND : start + _BAND + count]
        self._after = block[start + _BAND + count : start + count + 2 * _BAND]
        self._before[...] = self._after[...] = _MARK
        self._origin = None if origin is None or not count else _bytes(origin)
        self._inner[...] = 0xFF if self._origin is None else self._origin
        self.array = self._inner.view(dtype)

    @property
    def is_overrun(self) -> bool:
        return bool((self._before != _MARK).any() or (self._after != _MARK).any())

    @property
    def is_changed(self) -> bool:
        return self._origin is not None and not np.array_equal(self._inner, self._origin)

    def copy_back(self) -> None:
        if self._origin is not None:
            self._origin[...] = self._inner


def _bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes as they lie in memory, also for a column-major array. Writeable."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data))
