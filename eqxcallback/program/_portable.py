"""Arguments and results of exported programs: PyTrees that another process reads without the classes that they are of.

Tuples, lists and dicts of arrays stay as they are. Anything else becomes a dict of its arrays by their paths. What is static is
in the program; its text is a key of the dict, so that another value of it is another tree.
"""

import collections
import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
from jax.tree_util import keystr, tree_flatten_with_path

from ..core import PyTree
from ._static_text import static_text


_NUMBERS = (bool, int, float, complex)

IsArray = Callable[[Any], bool]


def is_array(leaf: object) -> bool:
    """True for what `equinox.filter_jit` takes as an array: Python's numbers are not arrays."""
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def is_array_or_number(leaf: object) -> bool:
    return is_array(leaf) or isinstance(leaf, _NUMBERS)


def portable(x: PyTree, is_array: IsArray = is_array, inside: IsArray | None = None) -> PyTree:
    """`x` itself, or a tree in which dicts stand for what another process cannot read.

    **Arguments:**

    - `is_array`: what is an array where it stands alone, or in tuples, lists and dicts.
    - `inside`: what is an array inside of other nodes, by default the same.
    """
    if _is_container(x):
        children = _children(x)
        made = [portable(child, is_array, inside) for child in children]
        return x if all(map(operator.is_, made, children)) else _like(x, made)
    if x is None or is_array(x):
        return x
    inside = is_array if inside is None else inside
    parts: dict[str, Any] = {f"{path} = {static_text(value)}": None for path, value in _statics(x, "", inside)}
    return parts | {keystr(path): leaf for path, leaf in tree_flatten_with_path(x)[0] if inside(leaf)}


def portable_results(x: PyTree) -> PyTree:
    """`x` as a program returns it. A number alone is an array there. In a Module it is static, as in arguments: such a result
    may be one.
    """
    return portable(x, is_array_or_number, is_array)


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
