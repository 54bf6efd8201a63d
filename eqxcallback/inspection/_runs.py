"""Observe what a program does when it runs."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .. import xla
from ._program import is_filter_jit


def host_calls(fn: Any, args: tuple[Any, ...], runs: int) -> tuple[int, ...]:
    """Count the host's calls of kernels in each of `runs` runs, on copies of `args`: a program may donate its operands."""
    jitted = isinstance(fn, jax.stages.Wrapped) or is_filter_jit(fn)
    # A function around it: Equinox warns of one that `jax.vmap` made.
    program = fn if jitted else eqx.filter_jit(lambda *args: fn(*args))
    counts = []
    for _ in range(runs):
        copies = jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, args)
        jax.block_until_ready(copies)
        before = xla.host_calls()
        jax.block_until_ready(eqx.filter(program(*copies), eqx.is_array))
        counts.append(xla.host_calls() - before)
    return tuple(counts)
