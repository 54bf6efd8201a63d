"""The calls that the kernels of this package can take."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ..core import Types


# What the kernels compute with.
KERNEL_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
"""The dtypes that kernels of this package take. Calls of others run the reference, or, of f64 on a GPU, XLA's products."""


def floats(types: Types, **options: object) -> bool | str:
    """Supports calls whose first argument, or its first leaf, has one of `KERNEL_DTYPES`."""
    del options
    return _has_one_of(types, KERNEL_DTYPES)


def floats_or_f64(types: Types, **options: object) -> bool | str:
    """Supports what `floats` does, and f64, which XLA multiplies."""
    del options
    return _has_one_of(types, (*KERNEL_DTYPES, jnp.dtype(jnp.float64)))


def _has_one_of(types: Types, dtypes: Sequence[jnp.dtype]) -> bool | str:
    dtype = jax.tree.leaves(types[0])[0].dtype
    *others, last = (str(dtype) for dtype in dtypes)
    return dtype in dtypes or f"{types._fields[0]} has to be {', '.join(others)} or {last}; it is {dtype}"


def floats_alike(*names: str) -> Callable[..., bool | str]:
    """Supports what `floats` does if these arguments have the dtype of the first one."""

    def supports(types: Types, **options: object) -> bool | str:
        first = types[0].dtype
        for name in names:
            dtype = getattr(types, name).dtype
            if dtype != first:
                return f"{name} has to have the dtype of {types._fields[0]}, {first}; it is {dtype}"
        return floats(types, **options)

    return supports
