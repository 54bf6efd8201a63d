"""Static options of an op: what they are in the identity of a program, and as attributes of a call."""

from collections.abc import Mapping
from typing import Any

import numpy as np


_SCALARS = {bool: np.bool_, int: np.int64, float: np.float64}


def attributes(options: Mapping[str, Any], who: str) -> dict[str, Any]:
    """`options` as typed attributes. JAX caches lowered calls by the values of their attributes, where `1`, `True` and
    `1.0` are one; with types they are three."""
    return {name: _attribute(value, f"{who}: the option {name}") for name, value in options.items()}


def _attribute(value: Any, what: str) -> Any:
    if isinstance(value, str | np.generic):
        return value
    if type(value) in _SCALARS:
        return _SCALARS[type(value)](value)
    if isinstance(value, tuple) and all(type(item) is int for item in value):
        return np.array(value, np.int64)
    raise TypeError(
        f"{what} is {value!r} of type {type(value).__name__}, which a native kernel cannot take. Expected a bool, int, float, "
        "str, NumPy scalar, or a tuple of ints."
    )
