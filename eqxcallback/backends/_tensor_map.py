"""Tensor maps of a call, as the driver takes them: but for the address, which is known when the call runs."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core import DType
from ..kernel import PROMOTIONS, SWIZZLES, TensorMap
from ._parameters import short


_RANK = 5
# CU_TENSOR_MAP_DATA_TYPE_...: copied, not computed with, so that bytes and words of any kind do where there is no other.
_TYPES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 0),
    **dict.fromkeys(("int16", "uint16"), 1),
    **{"uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9},
}
_TF32 = 11
_FLOATING = "float16", "float32", "float64", "bfloat16"


def numbers(
    declared: TensorMap,
    name: str,
    pointers: Sequence[tuple[str, Any]],
    called: Callable[[Any, str], Any],
    who: str,
) -> list[int]:
    """Return the numbers that describe a map to the launcher, except the place of its bytes: see `gpu/tensor_map.h`.

    **Arguments:** `called(field, name)` is what a field, which may be a function, is for this call.
    """
    who = f"{who}: the tensor map {name}"
    position = _position(declared.of, pointers, who)
    aval = pointers[position][1]
    if aval is None or 0 in aval.shape:  # there is nothing to copy: a map of no dimensions is not encoded
        return [position, *[0] * (4 * _RANK + 5)]
    kind = _kind(declared, aval.dtype, who)

    def sizes(field: str, default: Sequence[int]) -> tuple[int, ...]:
        value: Any = called(getattr(declared, field), f"{field} of the tensor map {name}")
        value = default if value is None else value
        given: tuple[Any, ...] = tuple(value) if isinstance(value, tuple | list) else (value,)
        if not all(isinstance(size, int | np.integer) for size in given):
            raise TypeError(f"{who}: expected {field} to be integers; got {value!r}.")
        return tuple(int(size) for size in given)

    shape = sizes("shape", aval.shape)
    if not 1 <= len(shape) <= _RANK or not all(0 < size <= 2**32 for size in shape):
        raise ValueError(
            f"{who}: expected shape to have 1 to {_RANK} dimensions, of 1 to {2**32}; got {shape}. Reshape it."
        )
    dense = [math.prod(shape[i + 1 :]) for i in range(len(shape) - 1)]
    strides, box = sizes("strides", dense), sizes("box", ())
    steps = sizes("element_strides", (1,) * len(shape))
    size = aval.dtype.itemsize
    if len(box) != len(shape) or not all(0 < count <= 256 for count in box):
        raise ValueError(f"{who}: expected box to be {len(shape)} numbers of 1 to 256, for {shape}; got {box}.")
    if box[-1] * size % 16:
        raise ValueError(
            f"{who}: expected a row of the box to have a multiple of 16 bytes; got {box[-1]} of {size} bytes."
        )
    if declared.swizzle != "none" and box[-1] * size > int(declared.swizzle):
        raise ValueError(
            f"{who}: expected a row of the box to have at most {declared.swizzle} bytes, which are swizzled; got "
            f"{box[-1]} of {size} bytes."
        )
    if len(strides) != len(shape) - 1 or not all(s * size % 16 == 0 and 0 < s * size < 2**40 for s in strides):
        raise ValueError(
            f"{who}: expected strides to be {len(shape) - 1} numbers, each a multiple of 16 bytes; got {strides} of {size} "
            "bytes. Pad the rows of the array."
        )
    if len(steps) != len(shape) or not all(0 < step <= 8 for step in steps):
        raise ValueError(f"{who}: expected element_strides to be {len(shape)} numbers of 1 to 8; got {steps}.")
    options = [0, SWIZZLES.index(declared.swizzle), PROMOTIONS.index(declared.l2_promotion), int(declared.nan_outside)]
    bytes_apart = [stride * size for stride in strides]
    return [
        *(position, kind, len(shape), *options),
        *(*_row(shape, _RANK), *_row(bytes_apart, _RANK - 1), *_row(box, _RANK), *_row(steps, _RANK)),
    ]


def _position(of: str | int, pointers: Sequence[tuple[str, object]], who: str) -> int:
    names = [short(name) for name, _ in pointers]
    positions = [i for i, (name, _) in enumerate(pointers) if of in (i, name, short(name))]
    if len(positions) != 1:
        raise ValueError(f"{who}: expected of to be one of {', '.join(names)}; got {of!r}.")
    return positions[0]


def _kind(declared: TensorMap, dtype: DType, who: str) -> int:
    name = np.dtype(dtype).name
    if name not in _TYPES:
        raise ValueError(f"{who}: expected an array of {', '.join(_TYPES)}; got {name}. Copy it by pointers.")
    if declared.tf32 and name != "float32":
        raise ValueError(f"{who}: expected an array of float32 for tf32=True; got {name}.")
    if declared.nan_outside and name not in _FLOATING:
        raise ValueError(f"{who}: expected an array of {', '.join(_FLOATING)} for nan_outside=True; got {name}.")
    return _TF32 if declared.tf32 else _TYPES[name]


def _row(sizes: Sequence[int], length: int) -> list[int]:
    """Innermost first, and as many as there may be."""
    return [*reversed(sizes), *[1] * (length - len(sizes))]
