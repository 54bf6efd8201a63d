"""Arrays over outputs, in checked mode, whose assignments neither broadcast nor lose values."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import _ext
from ..core import type_text


class StrictArray(np.ndarray):
    """Memory of an output. `array[index] = value`, also in a view of it, takes a scalar or the very shape of `array[index]`,
    and no value that the dtype cannot hold. What is computed from it is a plain array."""

    _kernel: str | None  # whose output this is; None for a copy, which may be written as any array

    def __array_finalize__(self, source: Any) -> None:
        self._kernel = None if self.flags.owndata else getattr(source, "_kernel", None)

    def __array_wrap__(self, array: Any, context: object = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else array

    def __setitem__(self, index: Any, value: Any) -> None:
        if self._kernel is not None:
            given, target = np.asarray(value), self.view(np.ndarray)[index]
            broadcast = given.ndim != 0 and given.shape != target.shape
            if broadcast or not _holds(self.dtype, given):
                what = "neither broadcasts nor casts to a lesser type"
                raise ValueError(
                    f"{self._kernel}: expected {type_text(self.dtype, np.shape(target))} in an assignment to an output; "
                    f"got {type_text(given.dtype, given.shape)}. Checked mode {what}: use np.broadcast_to or astype."
                )
        super().__setitem__(index, value)


# From what holds the least.
_KINDS = (jnp.bool_, jnp.unsignedinteger, jnp.signedinteger, jnp.floating, jnp.complexfloating)


def _holds(dtype: np.dtype, value: np.ndarray) -> bool:
    """True if casting="same_kind" of NumPy allows it, also for dtypes that NumPy lacks. A scalar integer only has to fit."""
    kind, given = _kind(dtype), _kind(value.dtype)
    if value.ndim == 0 and kind <= 2 and given <= 2:
        low, high = (0, 1) if kind == 0 else (int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max))
        return low <= int(value) <= high
    return given <= kind


def _kind(dtype: np.dtype) -> int:
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), len(_KINDS))


_plain_numpy = _ext.Buffer.numpy
_kernels: dict[int, str] = {}  # by the address of an output that a checked call is working on


def _numpy(buffer: _ext.Buffer) -> np.ndarray:
    array, kernel = _plain_numpy(buffer), _kernels.get(id(buffer))
    if kernel is None:
        return array
    strict = array.view(StrictArray)
    strict._kernel = kernel
    return strict


def switch(on: bool) -> None:
    """Let `Buffer.numpy()` ask which outputs are checked, or not. C++ makes the buffers, so their class is changed."""
    setattr(_ext.Buffer, "numpy", _numpy if on else _plain_numpy)  # noqa: B010 - a type checker knows no other one


@contextlib.contextmanager
def strict(outputs: Sequence[_ext.Buffer], kernel: str) -> Iterator[None]:
    """Within this context `numpy()` of `outputs` gives a `StrictArray`."""
    addresses = [id(buffer) for buffer in outputs]
    _kernels.update(dict.fromkeys(addresses, kernel))
    try:
        yield
    finally:
        for address in addresses:
            _kernels.pop(address, None)
