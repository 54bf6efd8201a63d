"""Products of 16 bits, summed in f32, where XLA has instructions for them: those of tensor cores, and on a CPU those of bf16."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from ..transform import product as product


_ROWS = 16


def product_of_rows(dtype: DTypeLike, a: Array, b: Array, result: DTypeLike = jnp.float32) -> Array:
    """The sum over all rows of the products of their numbers, of shape `(a.shape[-1], b.shape[-1])`, in f32 and rounded to
    `result`, of rows that are rounded to `dtype` before: the gradient of a weight.

    Rows of bf16 are in groups. XLA on a CPU multiplies f32 where two factors are both summed over their first axis; of two
    axes, it first brings the numbers into order, which takes far less time than it saves.
    """
    if dtype != jnp.bfloat16:
        return product("...c,...i->ci", dtype, a, b, result)

    def grouped(x: Array) -> Array:
        rows = x.astype(dtype).reshape(math.prod(x.shape[:-1]), x.shape[-1])
        rows = jnp.pad(rows, ((0, -rows.shape[0] % _ROWS), (0, 0)))
        return rows.reshape(rows.shape[0] // _ROWS, _ROWS, x.shape[-1])

    return product("rgc,rgi->ci", dtype, grouped(a), grouped(b), result)


def backward_of(function: Callable[..., object]) -> Callable[..., Any]:
    """The gradients of `function`, as the function of a `JaxKernel`."""

    def backward(args: Any, out: object, cotangents: Any, **options: object) -> Any:
        floats, others = eqx.partition(args, eqx.is_inexact_array)

        def of_floats(floats: Any) -> Any:
            return function(*eqx.combine(floats, others), **options)

        (gradients,) = jax.vjp(of_floats, floats)[1](cotangents)
        return gradients

    return backward
