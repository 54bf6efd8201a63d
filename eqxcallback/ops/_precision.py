"""The precision that references compute in."""

from typing import Any

import jax
import jax.numpy as jnp


def wide(dtype: Any) -> Any:
    """f32, or `dtype` if it is wider. Also where the user's own promotions are errors."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.float32)
