"""Static options of an op: what they are in the identity of a program, and as attributes of a call."""

from collections.abc import Mapping
from typing import Any

import numpy as np


# What an attribute of a call can be.
_DTYPES = tuple(np.dtype(code) for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8"))
_SCALARS = {bool: np.bool_, int: np.int64, float: np.float64}


def attributes(options: Mapping[str, object], who: str) -> dict[str, Any]:
    """`options` as typed attributes. JAX caches lowered calls by the values of their attributes, where `1`, `True` and
    `1.0` are one; with types they are three."""
    return {name: _attribute(value, f"{who}: the option {name}") for name, value in options.items()}


def _attribute(value: object, what: str) -> Any:
    if isinstance(value, str) or (isinstance(value, np.generic) and value.dtype in _DTYPES and _fits(value)):
        return value
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        return {key: _attribute(item, f"{what}[{key!r}]") for key, item in value.items()}
    try:
        if type(value) in _SCALARS:
            return _SCALARS[type(value)](value)
        if isinstance(value, tuple) and all(type(item) is int for item in value):
            return np.array(value, np.int64)
        if isinstance(value, tuple) and all(type(item) in (int, float) for item in value):
            return np.array(value, np.float64)
    except OverflowError:
        raise OverflowError(
            f"{what} is {value!r}, which a native kernel cannot take. Expected integers of 64 bits."
        ) from None
    raise TypeError(
        f"{what} is {value!r} of type {type(value).__name__}, which a native kernel cannot take. Expected a bool, int, float, "
        "str, tuple of ints or floats, a NumPy scalar of these of 8 to 64 bits, or a mapping of names to these."
    )


def _fits(value: np.generic) -> bool:
    return value.dtype != np.uint64 or int(value) < 2**63  # MLIR's Python bindings make signed integers only
