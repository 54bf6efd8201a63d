"""The parameters of a kernel in one call, made of texts: pointers, sizes and numbers. For C, CUDA C++ and images alike."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core import Aval, DType


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
OF_C = {
    **{name: np.dtype(np.complex64) for name in ("float _Complex", "float complex")},
    **{name: np.dtype(np.complex128) for name in ("double _Complex", "double complex")},
}
OF_CUDA = {
    **{name: np.dtype(jnp.float16) for name in ("__half", "half")},
    **{name: np.dtype(jnp.bfloat16) for name in ("__nv_bfloat16", "nv_bfloat16")},
    "__nv_fp8_e4m3": np.dtype(jnp.float8_e4m3fn),
    "__nv_fp8_e5m2": np.dtype(jnp.float8_e5m2),
    "float2": np.dtype(np.complex64),
    "double2": np.dtype(np.complex128),
}
_DEFAULTS = {kind: np.dtype(name) for kind, name in (("b", "bool"), ("i", "int64"), ("u", "int64"), ("f", "float64"))}
_OF_ARRAYS = re.compile(r"(?P<array>.+)\.(?P<what>size|ndim|(?P<per>shape|strides)\[\s*(?P<axis>-?\d+)\s*\])")


@dataclasses.dataclass(frozen=True)
class Array:
    """**Attributes:**

    - `index`: which of the pointers of the call it is. Of what is absent perhaps `None`.
    - `aval`: its type. Of what is absent `None`.
    - `is_divided`: whether a call gets some of its rows only.
    """

    index: int | None
    aval: Aval
    is_divided: bool = False


@dataclasses.dataclass(frozen=True)
class Pointer:
    """**Attributes:**

    - `name`: what is passed.
    - `index`: that of the array; `None` for a null pointer.
    - `dtype`: of the array, `None` for a null pointer.
    - `row_bytes`: of a row, if the array is divided, else 0.
    """

    name: str
    index: int | None
    dtype: DType
    row_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Number:
    """**Attributes:**

    - `value`: a number; of a structure and of a tensor map, what the scalar of a `DeviceCall` has.
    - `rows`: of which a call gets some, and `value` is for each; or `None`.
    """

    name: str
    dtype: np.dtype[Any]
    value: Any
    rows: int | None = None


def read(
    parameters: Sequence[str],
    arrays: Mapping[str, Array],
    numbers: Mapping[str, object],
    who: str,
    *,
    typed: Mapping[str, tuple[np.dtype, Any]],
    pointed: Mapping[str, np.dtype],
) -> list[Pointer | Number]:
    """**Arguments:**

    - `arrays`, `numbers`: what there is, by name.
    - `typed`: numbers whose dtype is known, and structures.
    - `pointed`: the names of types that only arrays have.
    """
    return [_Parameter.of(text, pointed, typed, who).of_call(arrays, numbers, typed) for text in parameters]


def short(name: str) -> str:
    """The name that parameters have for an array."""
    for words in ("the cotangent of ", "the gradient of "):
        if name.startswith(words):
            return "d" + short(name.removeprefix(words))
    name = re.sub(r"^workspace (\d+)$", r"workspace[\1]", name)
    return re.sub(r"^result\b", "out", name)  # those of an op, which has no names for them


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """A text as `"const float* x"`.

    **Attributes:**

    - `ctype`: without qualifiers and `*`, or empty.
    - `is_pointer`: whether the type says so.
    - `types`: what C++ or C calls dtypes.
    """

    ctype: str
    is_pointer: bool
    value: str
    types: Mapping[str, np.dtype[Any]]
    who: str

    @classmethod
    def of(
        cls, text: str, pointed: Mapping[str, np.dtype], typed: Mapping[str, tuple[np.dtype, Any]], who: str
    ) -> "_Parameter":
        tight = re.sub(r"\s*\[\s*(-?\w*)\s*\]", r"[\1]", text)
        match = re.fullmatch(r"\s*(?P<type>.*?)(?P<value>[^\s*]+?)(?P<array>\[\])?\s*", tight, re.DOTALL)
        who = f"{who}: the parameter {text!r}"
        if match is None:
            raise ValueError(f"{who}: expected a type, which may be left out, and a name or a number.")
        words = re.sub(
            r"\b(const|volatile|restrict|__restrict__?|__grid_constant__|struct)\b|\*", " ", match["type"]
        ).split()
        ctype, stars = " ".join(words), match["type"].count("*") + (match["array"] is not None)
        if stars > 1:
            raise ValueError(f"{who}: expected at most one *: a function gets pointers to numbers.")
        value, is_structure = match["value"], match["value"] in typed and typed[match["value"]][0].type is np.void
        if ctype not in ("", "void", *_CTYPES, *pointed) and not is_structure:
            raise ValueError(
                f"{who}: expected a type of C, without typedefs of your own; got {ctype!r}. There are {', '.join(_CTYPES)}, "
                f"and of pointers also void, {', '.join(pointed)}. Or leave it out."
            )
        return cls(ctype, stars == 1, value, {**_CTYPES, **pointed}, who)

    def of_call(
        self,
        arrays: Mapping[str, Array],
        numbers: Mapping[str, object],
        typed: Mapping[str, tuple[np.dtype, Any]],
    ) -> Pointer | Number:
        name = self.value
        if name in arrays:
            return self._pointer(arrays[name])
        if (match := _OF_ARRAYS.fullmatch(name)) and match["array"] in arrays:
            return self._number(*self._of_array(arrays[match["array"]], match))
        if name in typed:
            return self._typed(*typed[name])
        if name in numbers:
            return self._number(numbers[name])
        if (literal := _literal(name)) is not None:
            if self.is_pointer and literal == 0:
                return Pointer(name, None, None)
            return self._number(literal)
        raise ValueError(
            f"{self.who}: expected {name!r} to be a number, an array of the call ({', '.join(arrays) or 'none'}), its size, "
            f"ndim, shape[i] or strides[i], or an option ({', '.join({**numbers, **typed}) or 'none'})."
        )

    def _pointer(self, array: Array) -> Pointer:
        if self.ctype and not self.is_pointer:
            raise ValueError(f"{self.who}: expected a pointer, as {self.value} is an array. Write {self.ctype}*.")
        if array.aval is None:
            return Pointer(self.value, array.index, None)
        dtype = np.dtype(array.aval.dtype)
        if self.ctype not in ("", "void") and not _fits(dtype, self.types[self.ctype]):
            raise ValueError(f"{self.who}: expected an array of that type; got the dtype {dtype.name} of {self.value}.")
        row = math.prod(array.aval.shape[1:]) * dtype.itemsize if array.is_divided else 0
        return Pointer(self.value, array.index, dtype, row)

    def _of_array(self, array: Array, match: re.Match[str]) -> tuple[int, int | None]:
        """The number; or how much there is for each row, and the number of rows."""
        if array.aval is None:
            return 0, None
        shape = array.aval.shape
        if match["what"] == "ndim":
            return len(shape), None
        if match["what"] == "size":
            return (math.prod(shape[1:]), shape[0]) if array.is_divided else (math.prod(shape), None)
        axis = int(match["axis"])
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"{self.who}: {match['array']} has the shape {tuple(shape)} in this call.")
        axis %= len(shape)
        if match["per"] == "strides":
            return math.prod(shape[axis + 1 :]), None
        return (1, shape[0]) if array.is_divided and axis == 0 else (shape[axis], None)

    def _typed(self, dtype: np.dtype, value: object) -> Number:
        if self.is_pointer:
            raise ValueError(f"{self.who}: expected a value and no pointer, as {self.value} is one of scalars.")
        if self.ctype and dtype.type is not np.void and self.types.get(self.ctype) != dtype:
            raise ValueError(
                f"{self.who}: expected the type that scalars says, {dtype.name}. Leave it out, or change one of them."
            )
        return Number(self.value, dtype, value)

    def _number(self, value: object, rows: int | None = None) -> Number:
        """**Arguments:** `rows`: of which a call gets some, and `value` is for each."""
        if self.is_pointer or self.ctype not in ("", *_CTYPES):
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
                return Number(self.value, dtype, number)
        elif exact.dtype.kind != "f":
            low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
            if low <= number <= high and number * (rows or 1) <= high:
                return Number(self.value, dtype, number, rows)
        raise ValueError(f"{self.who}: expected a number that fits {self.ctype or dtype.name}; got {value!r}.")


def _literal(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return None


def _fits(dtype: np.dtype, declared: np.dtype) -> bool:
    """True if C may declare an array of `dtype` so. C has no names for some types, and their bits are integers there."""
    if dtype == declared:
        return True
    lacks_a_name = dtype.name not in {known.name for known in (*_CTYPES.values(), *OF_C.values())}
    return (lacks_a_name or dtype == np.bool_) and declared.kind in "iu" and declared.itemsize == dtype.itemsize
