"""The `vmap_method`s of JAX, for any primitive that calls an external kernel."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ...core import Aval, Failures, Value
from ..types import first_axis, with_first_axis
from ._eager import platform_of


VMAP_METHODS = ("sequential", "sequential_unrolled", "expand_dims", "broadcast_all", "legacy_vectorized")

Bind = Callable[..., Sequence[Value]]


def batch(
    bind: Bind,
    args: Sequence[Value],
    dims: Sequence[int | None],
    *,
    vmap_method: str | None,
    result_avals: Sequence[Aval],
    aliased: frozenset[int],
    is_python: bool,
) -> tuple[Sequence[Value], Sequence[int]]:
    """Call `bind(*args, result_avals=...)` on batched operands, by one of `VMAP_METHODS`.

    **Arguments:**

    - `args`, `dims`: the operands, and the axis of each one that is mapped, or `None`.
    - `result_avals`: of one example.
    - `aliased`: the operands that an output overwrites. Such an operand must have the output's shape, so one that is
        not mapped is broadcast, whatever the method.
    - `is_python`: whether the kernel is one in Python on a CPU: then a call outside of `jit` raises its exception.

    **Returns:** the outputs, all mapped over axis 0, and their axes.
    """
    (axis_size,) = {arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None}
    mapped = [dim is not None for dim in dims]
    args = mapped_first(args, dims)

    if vmap_method in ("sequential", "sequential_unrolled"):

        def one_example(_: None, batched: Sequence[Value]) -> tuple[None, Sequence[Any]]:
            rest = iter(batched)
            merged = [next(rest) if is_mapped else arg for arg, is_mapped in zip(args, mapped, strict=True)]
            return None, bind(*merged, result_avals=result_avals)

        batched_args = [arg for arg, is_mapped in zip(args, mapped, strict=True) if is_mapped]
        entry = first_axis(batched_args)

        def loop() -> Sequence[Value]:
            whole = with_first_axis(batched_args, None)
            outs = jax.lax.scan(one_example, None, whole, unroll=vmap_method == "sequential_unrolled")[1]
            return with_first_axis(outs, entry)

        outs = _raising(loop) if is_python else loop()
        return outs, [0] * len(outs)

    def broadcast(index: int, arg: Value) -> Value:
        if mapped[index] or (vmap_method == "legacy_vectorized" and index not in aliased):
            return arg
        size = axis_size if vmap_method == "broadcast_all" or index in aliased else 1
        return jnp.broadcast_to(arg, (size, *arg.shape))

    outs = bind(
        *(broadcast(index, arg) for index, arg in enumerate(args)),
        result_avals=tuple(aval.update(shape=(axis_size, *aval.shape)) for aval in result_avals),
    )
    return outs, [0] * len(outs)


def _raising(loop: Callable[[], Sequence[object]]) -> Sequence[Value]:
    """`loop()`. Outside of `jit` JAX makes it a program, which knows texts alone: this raises the exception of the kernel."""
    with Failures() as failures:
        try:
            outs = loop()
            # Other transformations around this one have tracers: nobody can wait for them.
            arrays = [out for out in outs if not isinstance(out, Tracer)]
            if platform_of(arrays) == "cpu":
                jax.block_until_ready(arrays)
        except Exception as error:
            failures.reraise(error)
    return outs


def mapped_first(args: Sequence[Value], dims: Sequence[int | None]) -> Sequence[Value]:
    """The mapped axes in front. What is not mapped may be a number of Python's, and becomes an array."""
    args = [arg if hasattr(arg, "shape") else jnp.asarray(arg) for arg in args]
    # Outside of `jit`, JAX compiles a program also for an axis that stays where it is.
    return [arg if dim in (None, 0) else jnp.moveaxis(arg, dim, 0) for arg, dim in zip(args, dims, strict=True)]
