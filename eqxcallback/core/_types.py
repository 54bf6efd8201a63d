"""Annotations that public functions share: what they accept beside JAX's arrays and Python's own numbers."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jaxtyping import Key, UInt32


AnyArray: TypeAlias = jax.Array | np.ndarray

AnyBool: TypeAlias = bool | np.bool_
AnyInt: TypeAlias = int | np.integer
AnyNumber: TypeAlias = float | int | np.floating | np.integer

# How many elements an axis has. A program that is exported for many sizes has symbols for them, whose class JAX keeps private.
Size: TypeAlias = Any


@runtime_checkable
class ShapeAndDtype(Protocol):
    """An array, a `jax.ShapeDtypeStruct`, or whatever else says what an array is like."""

    @property
    def shape(self) -> Sequence[Size]: ...

    @property
    def dtype(self) -> Any: ...


# Keys of `jax.random.key`, one for each example, and the words of old ones, of `jax.random.PRNGKey`.
Keys: TypeAlias = Key[jax.Array, "..."] | UInt32[AnyArray, "..."]
