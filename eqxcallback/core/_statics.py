"""Sameness of static values, where equality is not enough: `1`, `1.0` and `True` are three, `0.0` and `-0.0` two."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from ._types import PyTreeDef


# Of these types, equal values are the same. A value of another type may be equal to one of them, such as a member of an `Enum`.
_PLAIN = frozenset((str, bytes, type(None), type, types.FunctionType, types.BuiltinFunctionType))


class Memo(dict[Any, Any]):
    """A dict of what a function has computed before, which makes it no other function."""


def strict(value: object) -> Any:
    """Return a key for a static value: equal keys mean the same value, and not only an equal one."""
    if isinstance(value, float | complex | np.generic):
        return type(value), value, repr(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(strict, value))
    if isinstance(value, Mapping):
        return type(value), frozenset((strict(key), strict(item)) for key, item in value.items())
    if isinstance(value, frozenset | set):
        return type(value), frozenset(map(strict, value))
    if isinstance(value, slice):
        return slice, tuple(map(strict, (value.start, value.stop, value.step)))
    # One without `__eq__` is equal to itself alone. Its fields need no look, and may lead back to it.
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and type(value).__eq__ is not object.__eq__:
        compared = (field.name for field in dataclasses.fields(value) if field.compare)
        return type(value), value, tuple(strict(getattr(value, name)) for name in compared)
    return type(value), value


def strict_statics(treedef: PyTreeDef) -> tuple[Any, ...]:
    """Return keys for the static fields of a tree. They tell it from trees that are equal and not the same."""
    collected: list[Any] = []
    _collect(treedef, collected)
    return tuple(collected)


def _collect(treedef: PyTreeDef, collected: list[Any]) -> None:
    data = treedef.node_data()
    if data is None:
        return
    _add(data[1], collected)
    for child in treedef.children():
        _collect(child, collected)


def _add(value: object, collected: list[Any]) -> None:
    kind = type(value)
    if kind in _PLAIN:
        collected.append(value)
    elif isinstance(value, tuple | list) and kind in (tuple, list):  # and not a named tuple
        for item in value:
            _add(item, collected)
    else:
        key = strict(value)
        try:
            hash(key)
        except TypeError:  # what has no hash is compared by the tree alone
            key = kind
        collected.append(key)
