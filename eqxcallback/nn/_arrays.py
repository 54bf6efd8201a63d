"""What the layers that replace Equinox's have in common."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


ARRAYS = jax.Array, np.ndarray


def are_floats(*arrays: Any) -> bool:
    """Whether all are arrays of floating dtypes: ops take no others, for which layers do what Equinox does."""
    return all(isinstance(x, ARRAYS) and is_float(x.dtype) for x in arrays)


@functools.cache
def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)
