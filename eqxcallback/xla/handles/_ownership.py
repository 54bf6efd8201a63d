"""Let a compiled program own the callables that it calls."""

from collections.abc import Callable

import numpy as np
from jax.interpreters import mlir

from ._handles import keep_for_ever


def own(ctx: mlir.LoweringRuleContext, handle: Callable[..., None]) -> dict[str, np.uint64]:
    """Make the program the owner of `handle`, and let the callable run JAX.

    The CPU client runs a program that owns host callbacks synchronously: without that, a callback that runs JAX itself
    waits for a thread that waits for the callback.

    **Returns:** attributes for the call, with which it runs as that host callback of the program.
    """
    # The partitions of a `custom_partitioning` call are lowered into a module of this name, which is then compiled into
    # another program without its callbacks.
    if "tmp_xla_computation" in str(ctx.module_context.module.operation.attributes["sym_name"]):
        keep_for_ever(handle)
        return {}
    callbacks = ctx.module_context.host_callbacks
    if handle not in callbacks:
        ctx.module_context.add_host_callback(handle)
    return {"host_callback": np.uint64(callbacks.index(handle))}
