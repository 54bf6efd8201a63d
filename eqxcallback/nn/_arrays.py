"""Tools that all layers that replace Equinox's have in common."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..core import DType


ARRAYS = jax.Array, np.ndarray


def are_floats(*arrays: object) -> bool:
    """True if all are arrays of floating dtypes. Ops take no others, and for others layers do what Equinox does."""
    return all(isinstance(x, ARRAYS) and is_float(x.dtype) for x in arrays)


def others_of(implementation: ops.Implementation) -> ops.Implementation:
    """The implementation of a layer's other ops: not all kinds of kernels that have one op have another."""
    return "reference" if implementation == "reference" else "auto"


@functools.cache
def is_float(dtype: DType) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)
