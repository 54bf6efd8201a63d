"""The precision that references compute in."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def wide(dtype: DTypeLike) -> np.dtype:
    """f32, or `dtype` if it is wider. Also where the user's own promotions are errors."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4:  # of 8 bits, JAX promotes none
        return jnp.dtype(jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.float32)
