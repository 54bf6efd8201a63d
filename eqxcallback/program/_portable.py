"""Arguments and results of exported programs: PyTrees that another process reads without the classes that they are of.

Tuples, lists and dicts of arrays stay as they are. Anything else becomes a dict of its arrays by their paths. What is static is
in the program; its text is a key of the dict, so that another value of it is another tree.
"""

import collections
import dataclasses
import enum
import functools
import hashlib
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from ..core import PyTree, callable_name, type_text


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


# Their keys and lengths are in the paths of what is in them.
_CONTAINERS = (tuple, list, dict, collections.OrderedDict, collections.defaultdict)


def _statics(x: PyTree, path: str, is_array: IsArray) -> Iterator[tuple[str, Any]]:
    """All that is static, with its path: leaves, fields of Modules, and what other nodes keep beside their children."""
    if isinstance(x, eqx.Module):
        for field in dataclasses.fields(x):
            value, here = getattr(x, field.name, None), f"{path}.{field.name}"
            if field.metadata.get("static", False):
                yield here, value
            else:
                yield from _statics(value, here, is_array)
        return
    children, treedef = tree_flatten_with_path(x, is_leaf=lambda node: node is not x)
    node = treedef.node_data()
    if node is None:
        if not is_array(x):
            yield path, x
        return
    kind, kept = node
    if kind not in _CONTAINERS and not _is_empty(kept):
        yield path, kept
    for keys, child in children:
        yield from _statics(child, path + keystr(keys), is_array)


def _is_empty(kept: object) -> bool:
    return kept is None or (isinstance(kept, tuple | dict) and all(map(_is_empty, kept)))


def _text(value: object) -> str:
    """The same in each process."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        return f"{type_text(array.dtype, array.shape)} {hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()}"
    if isinstance(value, functools.partial):
        return f"{_text(value.func)} with {_text((value.args, value.keywords))}"
    if isinstance(value, types.FunctionType):
        return _text_of_function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return f"{type(value).__qualname__} {_text(fields)}"
    return callable_name(value) if callable(value) else type(value).__qualname__


def _text_of_function(function: types.FunctionType) -> str:
    """Its name. A lambda has none, and is told by the names and the numbers in it."""
    name = callable_name(function)
    if not name.endswith("<lambda>"):
        return name
    code = function.__code__
    constants = [value for value in code.co_consts if isinstance(value, int | float | complex | str)]
    held = [cell.cell_contents for cell in function.__closure__ or () if _is_plain(cell)]
    return f"{name} of {_text((code.co_varnames, sorted(code.co_names), sorted(map(repr, constants)), held))}"


def _is_plain(cell: types.CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, _PLAIN)
    except ValueError:  # it is empty
        return False
