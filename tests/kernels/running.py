"""Calls of kernels that were built for the CPU. Imports no JAX: a sanitized process starts with it."""

import ctypes
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Launch:
    """`entry` is the name of a kernel, as NVRTC takes it, without the namespace."""

    entry: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Call:
    """One or more launches with the same parameters: `operands`, `results`, `workspaces`, `scalars`.

    **Attributes:**

    - `file`: the source, in `eqxcallback/ops`.
    - `operands`, `results`: `None` is a null pointer: what is absent, or a gradient that is not needed.
    - `results`, `workspaces`: shapes and dtypes.
    - `aliases`: for a result, the operand that it overwrites.
    """

    file: str
    launches: Sequence[Launch]
    operands: Sequence[np.ndarray | None]
    results: Sequence[tuple[Sequence[int], Any] | None]
    scalars: Sequence[int | float]
    workspaces: Sequence[tuple[Sequence[int], Any]] = ()
    aliases: Mapping[int, int] = dataclasses.field(default_factory=dict)


class Guarded:
    """An array, `shift` bytes beyond a multiple of 16, with bytes on both sides that nobody may write."""

    def __init__(self, shape: Sequence[int], dtype: Any, shift: int = 0):
        size, margin = math.prod(shape) * np.dtype(dtype).itemsize, 64
        memory = np.full(size + 2 * margin + 32, 0xA5, np.uint8)
        start = margin + -(memory.ctypes.data + margin) % 16 + shift
        self._before, inner, self._after = np.split(memory, [start, start + size])
        inner[...] = 0xFF  # NaN
        self.array = inner.view(dtype).reshape(shape)

    def check(self) -> None:
        assert (self._before == 0xA5).all(), "written before the beginning of an array"
        assert (self._after == 0xA5).all(), "written beyond the end of an array"


def exact(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An array of its own, as large as it has to be: AddressSanitizer guards it."""
    array = np.empty(shape, dtype)
    array.view(np.uint8)[...] = 0xFF
    return array


def launch(
    library: ctypes.CDLL, index: int, how: Launch, arrays: Sequence[np.ndarray | None], scalars: Any, seed: int
) -> None:
    """Raises an error with what the launch reports."""
    values: list[Any] = [ctypes.c_void_p(None if array is None else array.ctypes.data) for array in arrays]
    values += [ctypes.c_float(x) if isinstance(x, float) else ctypes.c_longlong(x) for x in scalars]
    params = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    grid, block = (ctypes.c_uint * 3)(*(*how.grid, 1, 1)[:3]), (ctypes.c_uint * 3)(*(*how.block, 1, 1)[:3])
    if 0 in grid:
        return  # as the launcher does
    error = ctypes.create_string_buffer(1000)
    function = getattr(library, f"soft_launch_{index}")
    if function(
        params, grid, block, ctypes.c_uint(how.shared_bytes), ctypes.c_uint(seed), error, ctypes.c_size_t(1000)
    ):
        raise RuntimeError(f"{how.entry}: {error.value.decode()}")


def run(
    library: ctypes.CDLL,
    index_of: Mapping[str, int],
    call: Call,
    seed: int,
    *,
    guarded: bool = True,
    misaligned: bool = False,
) -> list[Any]:
    """The results, `None` for those that are null. Those that overwrite no operand, and workspaces, are NaN before; operands are
    checked to be what they were.

    `misaligned`: no array begins where another one does, relative to 16 bytes.
    """

    def make(shape: Sequence[int], dtype: Any) -> Any:
        if not guarded:
            return exact(shape, dtype)
        return Guarded(shape, dtype, np.dtype(dtype).itemsize * (1 + len(owners) % 3) if misaligned else 0)

    owners: list[Any] = []
    for operand in call.operands:
        owners.append(None if operand is None else make(operand.shape, operand.dtype))
        if operand is not None:
            _array(owners[-1])[...] = operand
    for i, of in enumerate(call.results):
        owners.append(owners[call.aliases[i]] if i in call.aliases else None if of is None else make(*of))
    owners += [make(*of) for of in call.workspaces]
    arrays = [None if owner is None else _array(owner) for owner in owners]
    for how in call.launches:
        launch(library, index_of[how.entry], how, arrays, call.scalars, seed)
    count = len(call.operands)
    for i, (array, operand) in enumerate(zip(arrays, call.operands, strict=False)):
        if operand is not None and i not in call.aliases.values():
            assert array is not None
            assert array.tobytes() == operand.tobytes(), f"operand {i} was written"
    for owner in owners:
        if isinstance(owner, Guarded):
            owner.check()
    return arrays[count : count + len(call.results)]


def _array(owner: Any) -> np.ndarray:
    return owner.array if isinstance(owner, Guarded) else owner
