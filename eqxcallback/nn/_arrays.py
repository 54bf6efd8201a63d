"""What the layers that replace Equinox's have in common."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def are_floats(*arrays: Any) -> bool:
    """Whether all are arrays of floating dtypes: ops take no others, for which layers do what Equinox does."""
    return all(isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating) for x in arrays)
