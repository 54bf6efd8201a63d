"""A PyTree without its arrays: what of it is static, and how it is made again from arrays or buffers."""

import enum
import functools
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.tree_util import tree_flatten, tree_unflatten

from .. import xla
from ..core import Aval, PyTree, PyTreeDef, Value, ref_text, strict, strict_statics
from ._builder import Build, Slot, builder


class _Array(enum.Enum):
    ARRAY = 0

    def __repr__(self) -> str:
        return "*"


_array: Any = _Array.ARRAY


def is_array(leaf: object) -> bool:
    """True if a leaf is an operand. Everything else is static, Python's numbers as well."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.Ref)


class Structure:
    """Hashable. Two are equal if what is static in them is the same, and not only equal."""

    # In place of an array, where it is said which leaves are.
    array: ClassVar[Any] = _array

    def __init__(self, treedef: PyTreeDef, leaves: Sequence[object], who: str):
        self.treedef = treedef
        self._leaves = tuple(_array if leaf is _array or is_array(leaf) else leaf for leaf in leaves)
        self._indices = tuple(i for i, leaf in enumerate(self._leaves) if leaf is _array)
        self._is_whole = len(self._indices) == len(self._leaves)
        statics = [leaf for leaf in self._leaves if leaf is not _array]
        self._key = (treedef, self._indices, tuple(map(strict, statics)), strict_statics(treedef))
        try:
            hash(tuple(statics))  # `strict` makes a set hashable, which may change
            self._hash = hash(self._key)
        except TypeError as error:
            raise TypeError(
                f"{who}: expected everything that is not an array to be static and hashable; got {_unhashable(statics)} "
                f"({error})."
            ) from None

    @classmethod
    def of_arrays(cls, treedef: PyTreeDef) -> "Structure":
        """Describe a tree whose leaves are all arrays."""
        return cls(treedef, [_array] * treedef.num_leaves, "")

    def __reduce__(self) -> tuple[Any, ...]:  # trees cannot be pickled, but what they are of can
        return _of_tree, (self.build([_array] * len(self._indices)),)

    @property
    def num_arrays(self) -> int:
        return len(self._indices)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self.build([_array] * len(self._indices)))

    @functools.cached_property
    def fast_build(self) -> Build:
        """`build` for kernels, which call it each time."""
        return builder(self.build([Slot(i) for i in range(len(self._indices))]))

    def build(self, arrays: Sequence[Value]) -> Any:
        if self._is_whole:
            return tree_unflatten(self.treedef, arrays)
        leaves = list(self._leaves)
        for i, array in zip(self._indices, arrays, strict=True):
            leaves[i] = array
        return tree_unflatten(self.treedef, leaves)

    def build_alone(self, arrays: Sequence[Value]) -> Any:
        """Build the tree with `None` in place of what is static."""
        leaves: list[Any] = [None] * len(self._leaves)
        for i, array in zip(self._indices, arrays, strict=True):
            leaves[i] = array
        return tree_unflatten(self.treedef, leaves)


def _of_tree(tree: PyTree) -> Structure:
    leaves, treedef = tree_flatten(tree)
    return Structure(treedef, leaves, "")


def typed(arrays: Sequence[Value]) -> tuple[list[Value], tuple[Aval, ...]]:
    """Operands and their types. A number's dtype gives way to those of others, but in JAX's code alone: here it is its own."""
    arrays, avals = list(arrays), [jax.typeof(array) for array in arrays]
    for i, aval in enumerate(avals):
        if getattr(aval, "weak_type", False) or isinstance(arrays[i], bool):
            arrays[i] = jax.lax.convert_element_type(arrays[i], aval.dtype)
            avals[i] = jax.typeof(arrays[i])
    return arrays, tuple(avals)


def check_typed(named: Iterable[tuple[str, Any]], who: str) -> None:
    """Raise `TypeError` for the first of the leaves, of which `named` has the paths, that has no type for `typed`."""
    for path, leaf in named:
        try:
            jax.typeof(leaf)
        except Exception as error:  # of views of Refs, JAX has one of its own
            if isinstance(leaf, xla.Buffer):
                raise called_with_a_buffer(who, path, "the function of its kernel") from None
            if (text := ref_text(leaf)) is not None:
                problem = f"{text}. Pass the values there, ref[...]"
            elif is_array(leaf):
                problem = f"{type(leaf).__name__} of dtype {leaf.dtype}. {xla.dtype_problem(leaf.dtype)}"
            else:
                problem = f"{reprlib.repr(leaf)} of type {type(leaf).__name__}. Static options are passed by keyword"
            raise TypeError(f"{who}: expected {path} to be an array or a number; got {problem}.") from error


def called_with_a_buffer(who: str, path: str, kernel: str) -> TypeError:
    return TypeError(
        f"{who}: expected arrays; called inside a kernel with a Buffer, {path}. Call {kernel}, or pass arrays, such as x[...]."
    )


def _unhashable(values: Sequence[object]) -> str:
    for value in values:
        try:
            hash(value)
        except TypeError:
            return f"{value!r} of type {type(value).__name__}"
    return "a static field that is not"
