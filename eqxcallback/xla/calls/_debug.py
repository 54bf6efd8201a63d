"""JAX's switches for debugging, where what they do for jitted functions is nothing that a kernel can do."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...core import Value


_config: Any = jax.config  # its options are made at run time: no type checker knows them


def is_debugging() -> bool:
    return _config.jax_disable_jit or _config.jax_debug_nans or _config.jax_debug_infs


def run_eagerly(run: Callable[..., Sequence[jax.Array]], what: object, *args: Value) -> Sequence[jax.Array]:
    """`run(*args)`, which runs a compiled program, with the switches off, and what they are for.

    `jax_disable_jit` is about the user's functions: a kernel has no other form than a program. `jax_debug_nans` runs a jitted
    function again without jit: here, the results are checked instead.
    """
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        outs = run(*args)
    return check_values(outs, what)


def check_values(outs: Sequence[jax.Array], what: object) -> Sequence[jax.Array]:
    """`outs`, or the error that the switches are for."""
    nans, infs = _config.jax_debug_nans, _config.jax_debug_infs
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        for out in outs:
            if jnp.issubdtype(out.dtype, jnp.inexact):
                for wanted, test, name in ((nans, jnp.isnan, "nan"), (infs, jnp.isinf, "inf")):
                    if wanted and test(out).any():
                        raise FloatingPointError(f"invalid value ({name}) encountered in {what!r}")
    return outs
