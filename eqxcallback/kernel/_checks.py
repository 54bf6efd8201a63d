"""Checks that the declarations of kernels have in common."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ._frozen import Frozen
from ._tensor_map import TensorMap


def frozen_mapping(kernel: Any, field: str) -> None:
    """A copy of a mapping: the caller's own may change."""
    value = getattr(kernel, field)
    if isinstance(value, Mapping):
        object.__setattr__(kernel, field, Frozen(value, f"{type(kernel).__name__}.{field}"))


def freeze_workspaces(kernel: Any, who: str) -> None:
    if callable(kernel.workspaces):
        return
    if not isinstance(kernel.workspaces, list | tuple):
        raise TypeError(
            f"{who}: expected workspaces to be jax.ShapeDtypeStructs, or a function; got {kernel.workspaces!r}."
        )
    object.__setattr__(kernel, "workspaces", tuple(kernel.workspaces))


def check_function(value: object, field: str, who: str) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{who}: expected {field} to be a function; got {value!r}.")


def hash_of(kernel: Any) -> int:
    """Hash all fields of a kernel. Mappings have no hash of their own."""
    values = (getattr(kernel, field.name) for field in dataclasses.fields(kernel))
    return hash(tuple(frozenset(value.items()) if isinstance(value, dict) else value for value in values))


# How NumPy calls the bytes of a tensor map.
_MAP = np.dtype("V128")
_SCALAR_DTYPES = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float32", "float64")


class Strict(Frozen):
    """A mapping that compares by order, as parameters have one, and by type: `1` and `True` are two, as are `0.0` and `-0.0`."""

    def _items(self) -> list[object]:
        return [
            (name, type(value), value, repr(value) if isinstance(value, float) else None)
            for name, value in self.items()
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strict) and self._items() == other._items()

    def __ne__(self, other: object) -> bool:
        return not self == other


def scalars(declared: object, who: str) -> Strict:
    """`{name: (dtype, function or None)}`."""
    if not isinstance(declared, Mapping):
        raise TypeError(f"{who}: expected scalars to be {{name: dtype}}; got {declared!r}.")
    return Strict({name: _scalar(name, value, who) for name, value in declared.items()}, f"{who}.scalars")


def _scalar(name: object, declared: Any, who: str) -> tuple[Any, Any]:
    if isinstance(declared, TensorMap):
        declared = (_MAP, declared)
    dtype, value = declared if isinstance(declared, tuple) and len(declared) == 2 else (declared, None)
    try:
        dtype = np.dtype(dtype).newbyteorder("=")  # the order of the processor, which a GPU has too
        known = dtype.name in _SCALAR_DTYPES or _is_structure(dtype)
    except TypeError:
        known = False
    if not isinstance(name, str) or not known or not (value is None or callable(value) or isinstance(value, TensorMap)):
        raise TypeError(
            f"{who}: expected scalars to be {{name: dtype}} or {{name: (dtype, function)}}, of {', '.join(_SCALAR_DTYPES)}, or a "
            f"structure; got {name!r}: {declared!r}."
        )
    return dtype, value


def _is_structure(dtype: np.dtype) -> bool:
    return dtype.type is np.void and dtype.itemsize > 0 and dtype.subdtype is None and not dtype.hasobject


def no_structures(declared: Strict, who: str) -> None:
    for name, (dtype, _) in declared.items():
        if dtype.type is np.void:
            raise TypeError(
                f"{who}: expected scalars to be numbers; got the structure {name}. Make descriptors in the kernel, by "
                "tl.make_tensor_descriptor."
            )


def check_arch(arch: str | None, who: str) -> None:
    kind, _, version = arch.partition("_") if isinstance(arch, str) else ("", "", "")
    if arch is not None and not (kind in ("sm", "compute") and version.rstrip("af").isdigit()):
        raise ValueError(f"{who}: expected arch to be such as 'sm_90', or 'compute_80' for PTX; got {arch!r}.")
