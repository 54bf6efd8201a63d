"""What the kernels of this package can take."""

from typing import Any

import jax
import jax.numpy as jnp


# What the kernels compute with.
KERNEL_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def floats(types: Any, **options: Any) -> bool | str:
    """Supports calls whose first argument, or its first leaf, has one of `KERNEL_DTYPES`."""
    del options
    dtype = jax.tree.leaves(types[0])[0].dtype
    if dtype in KERNEL_DTYPES:
        return True
    return f"{types._fields[0]} has to be float32, bfloat16 or float16; it is {dtype}"
