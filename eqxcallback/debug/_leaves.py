"""The leaves of what is tapped: checked, and typed PRNG keys as the data that kernels are given."""

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from .. import xla
from ..core import PyTree


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The structure that a tree is made again from.

    **Attributes:**

    - `tree`: its structure.
    - `keys`: for each leaf, the implementation of a typed PRNG key, or `None`.
    """

    tree: PyTree
    keys: tuple[str | None, ...]

    @classmethod
    def of(cls, x: Any, who: str) -> tuple["Leaves", list[Any]]:
        """Take `x` apart: return its `Leaves`, and the arrays that stand for its leaves in a program.

        **Raises:** `TypeError`, naming the leaf that is nothing for a kernel.
        """
        flat, tree = tree_flatten_with_path(x)
        keys: list[str | None] = []
        arrays: list[Any] = []
        for path, leaf in flat:
            name, problem = f"x{keystr(path)}", _problem(leaf)
            if problem is not None:
                raise TypeError(f"{who}: expected {name} to be an array or a number; got {_text(leaf)}. {problem}.")
            is_key = jax.dtypes.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.prng_key)
            keys.append(str(jax.random.key_impl(leaf)) if is_key else None)
            arrays.append(jax.random.key_data(leaf) if is_key else leaf)
        return cls(tree, tuple(keys)), arrays

    def from_program(self, arrays: Sequence[Any]) -> Any:
        """The tree of what a program made of `arrays`."""
        return self.tree.unflatten(
            array if impl is None else jax.random.wrap_key_data(array, impl=impl)
            for impl, array in zip(self.keys, arrays, strict=True)
        )

    def from_kernel(self, arrays: Sequence[np.ndarray], leaves: Sequence[int]) -> Any:
        """The tree of NumPy arrays that stand for the leaves with these numbers. `None` stands for others. The words of a key
        have its implementation in their dtype's metadata."""
        values: list[Any] = [None] * len(self.keys)
        for number, array in zip(leaves, arrays, strict=True):
            impl = self.keys[number]
            if impl is not None:
                array = array.view(np.dtype(array.dtype, metadata={"prng_impl": impl}))
            values[number] = array
        return self.tree.unflatten(values)


def _problem(leaf: object) -> str | None:
    try:
        dtype = jax.typeof(leaf).dtype
    except (TypeError, AttributeError):  # a Ref has no dtype here
        return "Tap arrays only, and give the function anything else with functools.partial"
    return xla.dtype_problem(dtype)


def _text(leaf: object) -> str:
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return f"{type(leaf).__name__} of dtype {leaf.dtype}"
    return f"{reprlib.repr(leaf)} of type {type(leaf).__name__}"
