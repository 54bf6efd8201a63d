"""Waiting for what kernels did."""

import jax

from .. import _errors


def barrier_wait() -> None:
    """Wait for all effects of programs that were started, and raise the error of a kernel that poisoned its results.

    **Raises:** [`eqxcallback.KernelError`][], for the first one since the last call or the end of the last
    [`eqxcallback.raising`][].
    """
    jax.effects_barrier()
    _errors.raise_poisoned()
