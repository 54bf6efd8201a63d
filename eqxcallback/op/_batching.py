"""How `vmap` calls an op's kernel."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from .. import xla


if TYPE_CHECKING:
    from ._call import Call


METHODS = ("sequential", "sequential_unrolled", "broadcast_all")
MODES = ("batched", "either", "shared")


def batch(
    call: "Call", bind: xla.Bind, args: Sequence[Any], dims: Sequence[int | None]
) -> tuple[Sequence[Any], Sequence[int]]:
    """Call `bind(call, *args)` with the operands mapped over `dims`. Returns the results, mapped over axis 0, and their axes."""
    batching = call.op.batching
    modes = _modes(call)
    needs_examples = any(mode == "shared" and dim is not None for mode, dim in zip(modes, dims, strict=True))
    if needs_examples or batching in ("sequential", "sequential_unrolled"):
        return xla.batch(
            lambda *args, result_avals: bind(call, *args),
            args,
            dims,
            vmap_method="sequential_unrolled" if batching == "sequential_unrolled" else "sequential",
            result_avals=call.result_avals,
            aliased=frozenset(),
        )

    (size,) = {arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None}
    mapped = {name for name, dim in zip(call.names, dims, strict=True) if dim is not None}
    batched_args, depths = [], []
    for arg, dim, depth, mode, name in zip(args, dims, call.depths, modes, call.names, strict=True):
        if name not in mapped and mode != "batched":
            batched_args.append(arg)
            depths.append(depth)
            continue
        # In front: this axis, then those that other operands have and this one lacks.
        missing = call.batch_shape[: len(call.batch_shape) - depth]
        own = arg.shape if dim is None else jnp.moveaxis(arg, dim, 0).shape[1:]
        arg = arg if dim is None else jnp.moveaxis(arg, dim, 0)
        arg = arg.reshape(1 if dim is None else size, *(1 for _ in missing), *own)
        batched_args.append(jnp.broadcast_to(arg, (size, *missing, *own)))
        depths.append(len(call.batch_shape) + 1)
    batched = dataclasses.replace(call, batch_shape=(size, *call.batch_shape), depths=tuple(depths))
    outs = bind(batched, *batched_args)
    return outs, [0] * len(outs)


def _modes(call: "Call") -> Sequence[str]:
    """For each flat operand."""
    batching = call.op.batching
    aliased = {i for _, pairs in call.aliases for i, _ in pairs}
    if isinstance(batching, str):
        return ["batched"] * len(call.names)
    return ["batched" if i in aliased else batching.get(name, "batched") for i, name in enumerate(call.names)]
