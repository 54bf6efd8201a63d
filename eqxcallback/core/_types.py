"""Annotations that public functions share: what they accept beside JAX's arrays and Python's own numbers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jaxtyping import Key, UInt32


if TYPE_CHECKING:
    from typing_extensions import TypeAliasType, TypeVar

    # For type checkers jaxtyping's `PyTree` is unknown, on purpose, JAX's `PyTreeDef` a variable, and `KeyPath` half unknown.
    PyTree = TypeAliasType("PyTree", Any, type_params=(TypeVar("Leaf", default=Any),))
    PyTreeDef: TypeAlias = Any
    KeyPath: TypeAlias = tuple[Any, ...]
else:
    from jax.tree_util import KeyPath as KeyPath, PyTreeDef as PyTreeDef
    from jaxtyping import PyTree as PyTree

AnyArray: TypeAlias = jax.Array | np.ndarray

AnyBool: TypeAlias = bool | np.bool_
AnyInt: TypeAlias = int | np.integer
AnyNumber: TypeAlias = float | int | np.floating | np.integer

# These have no narrower type that is both true and public. An argument that is only passed on is an `object`.

# A value in a program: an array, a number, a tracer, a `jax.Ref`, in a lowering rule one of MLIR's, or `None` for an absent
# operand and for a zero tangent.
Value: TypeAlias = Any

# The type of a `Value`: `jax.core.ShapedArray` of arrays, and of Refs a class that JAX keeps private.
Aval: TypeAlias = Any

# A dtype of NumPy, or one of JAX's own, such as those of keys, whose class JAX keeps private.
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


# The types of an op's arguments, as a kernel's `supports` gets them: a named tuple of a class that is made for the op.
Types: TypeAlias = Any

# Keys of `jax.random.key`, one for each example, and the words of old ones, of `jax.random.PRNGKey`.
Keys: TypeAlias = Key[jax.Array, "..."] | UInt32[AnyArray, "..."]
