"""Annotations that public functions share: what they accept beside JAX's arrays and Python's own numbers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jaxtyping import Key, UInt32


if TYPE_CHECKING:
    from typing_extensions import TypeAliasType, TypeVar

    # For type checkers jaxtyping's `PyTree` is unknown, on purpose, and JAX's `PyTreeDef` a variable.
    PyTree = TypeAliasType("PyTree", Any, type_params=(TypeVar("Leaf", default=Any),))
    PyTreeDef: TypeAlias = Any
else:
    from jax.tree_util import PyTreeDef as PyTreeDef
    from jaxtyping import PyTree as PyTree

AnyArray: TypeAlias = jax.Array | np.ndarray

AnyBool: TypeAlias = bool | np.bool_
AnyInt: TypeAlias = int | np.integer
AnyNumber: TypeAlias = float | int | np.floating | np.integer

# What has no narrower type that is true, and is public. What is passed, and not looked into, is an `object`.

# What flows through a program: an array, a number, a tracer, a `jax.Ref`, or `None` for what is absent or zero.
Value: TypeAlias = Any

# The type of a `Value`: `jax.core.ShapedArray` of arrays, and of Refs a class that JAX keeps private.
Aval: TypeAlias = Any

# NumPy's, or one of JAX's own, such as keys have, whose class JAX keeps private.
DType: TypeAlias = Any

# How many elements an axis has. A program that is exported for many sizes has symbols for them, whose class JAX keeps private.
Size: TypeAlias = Any


@runtime_checkable
class ShapeAndDtype(Protocol):
    """An array, a `jax.ShapeDtypeStruct`, or whatever else says what an array is like."""

    @property
    def shape(self) -> Sequence[Size]: ...

    @property
    def dtype(self) -> DType: ...


# Keys of `jax.random.key`, one for each example, and the words of old ones, of `jax.random.PRNGKey`.
Keys: TypeAlias = Key[jax.Array, "..."] | UInt32[AnyArray, "..."]


# The types of an op's arguments, which a kernel's functions are asked with: a named tuple of each `ShapeAndDtype` or tree of
# them, of a class that is made for the op.
Types: TypeAlias = Any
