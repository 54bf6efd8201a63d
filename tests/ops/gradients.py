"""Gradients of cases, by their kernels and by their references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from . import table
from .table import floating, normal, together


@functools.cache
def gradient_of(function, numbers):
    """One function for each op: JAX compiles it once, for all instruction sets."""

    def loss(upstream, *args):
        return (function(*args).astype(jnp.float32) * upstream).sum()

    return jax.grad(loss, tuple(i + 1 for i in numbers))


def gradients(function, args, upstream):
    return [np.asarray(g) for g in table.quickly_compiled(gradient_of(function, floating(args)))(upstream, *args)]


def upstream_of(case):
    """As the kernel gets it."""
    upstream = normal(9, jax.eval_shape(case.op, *case.args).shape)
    return upstream.astype(case.dtype or case.args[0].dtype).astype(np.float32)


def check(case, results, want):
    for got, exact in zip(results, want, strict=True):
        table.tolerate(got, exact, 4 * case.terms + case.args[0].size)


def every_gradient(functions, operands, upstreams):
    of_each = tuple(gradient_of(f, floating(args)) for f, args in zip(functions, operands, strict=True))
    all_operands = [(upstream, *args) for upstream, args in zip(upstreams, operands, strict=True)]
    return jax.device_get(table.quickly_compiled(together(of_each))(all_operands))
