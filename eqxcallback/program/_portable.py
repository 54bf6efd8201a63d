"""Arguments and results of exported programs: PyTrees that another process reads without the classes that they are of.

Tuples, lists and dicts of arrays stay as they are. Anything else becomes a dict of its arrays by their paths. What is static is
in the program; its text is a key of the dict, so that another value of it is another tree.
"""

import dataclasses
import enum
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from ..core import PyTree, callable_name


_NUMBERS = (bool, int, float, complex)
_PLAIN = (*_NUMBERS, str, bytes, type(None), type(Ellipsis), np.dtype, enum.Enum)

IsArray = Callable[[Any], bool]


def is_array(leaf: object) -> bool:
    """True for what `equinox.filter_jit` takes as an array: Python's numbers are not arrays."""
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def is_array_or_number(leaf: object) -> bool:
    return is_array(leaf) or isinstance(leaf, _NUMBERS)


def portable(x: PyTree, is_array: IsArray = is_array) -> PyTree:
    """`x` itself, or a tree in which dicts stand for what another process cannot read."""
    if _is_container(x):
        children = _children(x)
        made = [portable(child, is_array) for child in children]
        return x if all(map(operator.is_, made, children)) else _like(x, made)
    if x is None or is_array(x):
        return x
    parts: dict[str, Any] = {f"{path} = {_text(value)}": None for path, value in _statics(x, "", is_array)}
    return parts | {keystr(path): leaf for path, leaf in tree_flatten_with_path(x)[0] if is_array(leaf)}


def restore(x: PyTree, given: PyTree) -> PyTree:
    """A tree like `x`, with arrays from `given`, which is like `portable(x)`."""
    if _is_container(x):
        return _like(x, [restore(*pair) for pair in zip(_children(x), _children(given), strict=True)])
    if x is None or is_array(x):
        return given
    leaves, treedef = tree_flatten_with_path(x)
    return treedef.unflatten(given[keystr(path)] if is_array(leaf) else leaf for path, leaf in leaves)


def _is_container(x: PyTree) -> bool:
    return type(x) in (tuple, list) or (type(x) is dict and all(type(key) is str for key in x))


def _children(x: PyTree) -> list[PyTree]:
    return [x[name] for name in sorted(x)] if isinstance(x, dict) else list(x)


def _like(x: PyTree, children: list[PyTree]) -> Any:
    return dict(zip(sorted(x), children, strict=True)) if isinstance(x, dict) else type(x)(children)


def _statics(x: PyTree, path: str, is_array: IsArray) -> Iterator[tuple[str, Any]]:
    """Static leaves, and static fields of Modules, with their paths."""
    for keys, leaf in tree_flatten_with_path(x, is_leaf=lambda node: isinstance(node, eqx.Module))[0]:
        here = path + keystr(keys)
        if not isinstance(leaf, eqx.Module):
            if not is_array(leaf):
                yield here, leaf
            continue
        for field in dataclasses.fields(leaf):
            value = getattr(leaf, field.name, None)
            if field.metadata.get("static", False):
                yield f"{here}.{field.name}", value
            else:
                yield from _statics(value, f"{here}.{field.name}", is_array)


def _text(value: object) -> str:
    """The same in each process."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    return callable_name(value) if callable(value) else type(value).__qualname__
