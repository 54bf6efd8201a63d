"""What the parameters of a C function are in one call: names become pointers, sizes and numbers."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


# The types of numbers that C has names for, on the machines that we run on, where a `long` has 64 bits.
_CTYPES = {
    **{name: np.dtype(np.bool_) for name in ("bool", "_Bool")},
    **{name: np.dtype(np.int8) for name in ("char", "signed char", "int8_t")},
    **{name: np.dtype(np.uint8) for name in ("unsigned char", "uint8_t")},
    **{name: np.dtype(np.int16) for name in ("short", "int16_t")},
    **{name: np.dtype(np.uint16) for name in ("unsigned short", "uint16_t")},
    **{name: np.dtype(np.int32) for name in ("int", "int32_t")},
    **{name: np.dtype(np.uint32) for name in ("unsigned", "unsigned int", "uint32_t")},
    **{name: np.dtype(np.int64) for name in ("long", "long long", "int64_t", "ptrdiff_t", "intptr_t", "ssize_t")},
    **{
        name: np.dtype(np.uint64) for name in ("unsigned long", "unsigned long long", "uint64_t", "size_t", "uintptr_t")
    },
    **{name: np.dtype(np.float32) for name in ("float",)},
    **{name: np.dtype(np.float64) for name in ("double",)},
}
# These are for pointers alone.
_POINTED = {
    **{name: np.dtype(np.complex64) for name in ("float _Complex", "float complex")},
    **{name: np.dtype(np.complex128) for name in ("double _Complex", "double complex")},
}
_DEFAULTS = {kind: np.dtype(name) for kind, name in (("b", "bool"), ("i", "int64"), ("u", "int64"), ("f", "float64"))}
_POINTER, _INTEGER, FLOAT = range(3)
_OF_ARRAYS = re.compile(r"(?P<array>.+)\.(?P<what>size|ndim|(?P<per>shape|strides)\[\s*(?P<axis>-?\d+)\s*\])")


@dataclasses.dataclass(frozen=True)
class Array:
    """**Attributes:**

    - `index`: which of the operands and results it is, the results after the operands. `None` if it is absent.
    - `aval`: its type. Of what is absent `None`.
    - `is_divided`: whether a call gets some of its rows only.
    """

    index: int | None
    aval: Any
    is_divided: bool = False


def numbers(
    parameters: Sequence[str], arrays: Mapping[str, Array], scalars: Mapping[str, Any], who: str
) -> list[tuple[int, int, int, int]]:
    """What the handler of C functions takes: see csrc/ffi/c_call.cc."""
    return [_Parameter.of(text, who).numbers(arrays, scalars) for text in parameters]


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """A text as `"const float* x"`.

    **Attributes:**

    - `ctype`: without qualifiers and `*`, or empty.
    - `is_pointer`: whether the type says so.
    """

    text: str
    ctype: str
    is_pointer: bool
    value: str
    who: str

    @classmethod
    def of(cls, text: str, who: str) -> "_Parameter":
        tight = re.sub(r"\s*\[\s*(-?\w*)\s*\]", r"[\1]", text)
        found = re.fullmatch(r"\s*(?P<type>.*?)(?P<value>[^\s*]+?)(?P<array>\[\])?\s*", tight, re.DOTALL)
        who = f"{who}: the parameter {text!r}"
        if found is None:
            raise ValueError(f"{who}: expected a type, which may be left out, and a name or a number.")
        words = re.sub(r"\b(const|volatile|restrict|__restrict__?|struct)\b|\*", " ", found["type"]).split()
        ctype, stars = " ".join(words), found["type"].count("*") + (found["array"] is not None)
        if stars > 1:
            raise ValueError(f"{who}: expected at most one *: a function gets pointers to numbers.")
        if ctype not in ("", "void", *_CTYPES, *_POINTED):
            raise ValueError(
                f"{who}: expected a type of C, without typedefs of your own; got {ctype!r}. There are {', '.join(_CTYPES)}, "
                f"and of pointers also void, {', '.join(_POINTED)}."
            )
        return cls(text, ctype, stars == 1, found["value"], who)

    def numbers(self, arrays: Mapping[str, Array], scalars: Mapping[str, Any]) -> tuple[int, int, int, int]:
        name = self.value
        if name in arrays:
            return self._pointer(arrays[name])
        if (found := _OF_ARRAYS.fullmatch(name)) and found["array"] in arrays:
            return self._number(*self._of_array(arrays[found["array"]], found))
        if name in scalars:
            return self._number(scalars[name])
        if (literal := _literal(name)) is not None:
            return self._number(literal)
        raise ValueError(
            f"{self.who}: expected {name!r} to be a number, an array of the call ({', '.join(arrays) or 'none'}), its size, "
            f"ndim, shape[i] or strides[i], or an option ({', '.join(scalars) or 'none'})."
        )

    def _pointer(self, array: Array) -> tuple[int, int, int, int]:
        if self.ctype and not self.is_pointer:
            raise ValueError(f"{self.who}: expected a pointer, as {self.value} is an array. Write {self.ctype}*.")
        if array.aval is None:
            return _POINTER, -1, 0, 0
        dtype = np.dtype(array.aval.dtype)
        if self.ctype not in ("", "void") and not _fits(dtype, {**_CTYPES, **_POINTED}[self.ctype]):
            raise ValueError(f"{self.who}: expected an array of that type; got the dtype {dtype.name} of {self.value}.")
        assert array.index is not None
        row = math.prod(array.aval.shape[1:]) * dtype.itemsize if array.is_divided else 0
        return _POINTER, array.index, row, 0

    def _of_array(self, array: Array, found: re.Match[str]) -> tuple[int, int | None]:
        """The number; or how much there is for each row, and the number of rows."""
        if array.aval is None:
            return 0, None
        shape = array.aval.shape
        if found["what"] == "ndim":
            return len(shape), None
        if found["what"] == "size":
            return (math.prod(shape[1:]), shape[0]) if array.is_divided else (math.prod(shape), None)
        axis = int(found["axis"])
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"{self.who}: {found['array']} has the shape {tuple(shape)} in this call.")
        axis %= len(shape)
        if found["per"] == "strides":
            return math.prod(shape[axis + 1 :]), None
        return (1, shape[0]) if array.is_divided and axis == 0 else (shape[axis], None)

    def _number(self, value: Any, rows: int | None = None) -> tuple[int, int, int, int]:
        """**Arguments:** `rows`: of which a call gets some, and `value` is for each."""
        if self.is_pointer or self.ctype == "void" or self.ctype in _POINTED:
            raise ValueError(f"{self.who}: expected a type of numbers, as {self.value} is one.")
        exact = np.asarray(value)
        if exact.shape != () or exact.dtype.kind not in "biuf":
            raise ValueError(f"{self.who}: expected a number; got {value!r}.")
        dtype = _CTYPES.get(self.ctype) or _DEFAULTS[exact.dtype.kind]
        number = exact.item()
        if dtype.kind == "f":
            with np.errstate(over="ignore"):
                fitted = dtype.type(number)
            if np.isfinite(fitted) or not np.isfinite(exact):
                return FLOAT, 0, 0, int(np.frombuffer(fitted.tobytes().ljust(8, b"\0"), np.int64)[0])
        elif exact.dtype.kind != "f":
            low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
            if low <= number <= high and number * (rows or 1) <= high:
                return _INTEGER, 0, int(rows is not None), (int(number) + 2**63) % 2**64 - 2**63
        raise ValueError(f"{self.who}: expected a number that fits {self.ctype or dtype.name}; got {value!r}.")


def _literal(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return None


def _fits(dtype: np.dtype[Any], declared: np.dtype[Any]) -> bool:
    """Whether an array of `dtype` may be what C declares. It has no names for some types, and their bits are integers there."""
    if dtype == declared:
        return True
    lacks_a_name = dtype.name not in {known.name for known in (*_CTYPES.values(), *_POINTED.values())}
    return (lacks_a_name or dtype == np.bool_) and declared.kind in "iu" and declared.itemsize == dtype.itemsize
