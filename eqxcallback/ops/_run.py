"""Which of an op's kernels a call runs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._checks import check
from ..op import Implementation, Op


# What the kernels of this package compute with.
KERNEL_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def run(op: Op, x: jax.Array, *args: Any, implementation: Implementation = "auto", **options: Any) -> Any:
    """The `implementation` of `op`. By default its definition where the dtype of `x` is none that its kernels know."""
    if implementation not in ("auto", "reference"):
        chosen = op.using(implementation)
        check(
            implementation == "python" or x.dtype in KERNEL_DTYPES,
            op.name,
            f"{', '.join(dtype.name for dtype in KERNEL_DTYPES)} for implementation={implementation!r}",
            x=x,
        )
        return chosen(x, *args, **options)
    if implementation == "reference":
        op = op.using(implementation)
    if op.kernels and x.dtype in KERNEL_DTYPES:
        return op(x, *args, **options)
    assert op.reference is not None
    return op.reference(x, *args, **options)


@functools.cache
def on_cpus(op: Op) -> Op:
    """`op` without its kernels for GPUs, which the arguments are too large for."""
    backward = op.backward if isinstance(op.backward, dict) else {}
    kernels, backward = (
        {platform: kernel for platform, kernel in each.items() if platform == "cpu"} for each in (op.kernels, backward)
    )
    return dataclasses.replace(op, kernels=kernels, backward=backward or None)
