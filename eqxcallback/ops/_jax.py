"""Products of 16 bits, summed in f32, where XLA has instructions for them: those of tensor cores, and on a CPU those of bf16."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array


def product(subscripts: str, dtype: DTypeLike, a: Array, b: Array) -> Array:
    """`jnp.einsum` of two arrays, in f32. They are rounded to `dtype` before, as are cotangents in its derivatives. No subscript
    may be summed over that one array alone has. Products of f32 are as precise as `jax.default_matmul_precision` says.
    """
    return _product(subscripts, dtype, a, b)


def _einsum(subscripts: str, dtype: DTypeLike, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)


def _forward(subscripts: str, dtype: DTypeLike, a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return product(subscripts, dtype, a, b), (a, b)


def _backward(subscripts: str, dtype: DTypeLike, saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    a, b = saved
    inputs, out = subscripts.split("->")
    of_a, of_b = inputs.split(",")
    d_a = product(f"{out},{of_b}->{of_a}", dtype, cotangent, b)
    d_b = product(f"{out},{of_a}->{of_b}", dtype, cotangent, a)
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


_product: Any = jax.custom_vjp(_einsum, nondiff_argnums=(0, 1))
_product.defvjp(_forward, _backward)


_ROWS = 16


def product_of_rows(dtype: DTypeLike, a: Array, b: Array) -> Array:
    """The sum over all rows of the products of their numbers, of shape `(a.shape[-1], b.shape[-1])`, in f32, of rows that are
    rounded to `dtype` before: the gradient of a weight.

    Rows of bf16 are in groups. XLA on a CPU multiplies f32 where two factors are both summed over their first axis; of two
    axes, it first brings the numbers into order, which takes far less time than it saves.
    """
    if dtype != jnp.bfloat16:
        return product("...c,...i->ci", dtype, a, b)

    def grouped(x: Array) -> Array:
        rows = x.astype(dtype).reshape(math.prod(x.shape[:-1]), x.shape[-1])
        rows = jnp.pad(rows, ((0, -rows.shape[0] % _ROWS), (0, 0)))
        return rows.reshape(-1, _ROWS, x.shape[-1])

    axes = (((0, 1), (0, 1)), ((), ()))
    return jax.lax.dot_general(grouped(a), grouped(b), axes, preferred_element_type=jnp.float32)


def backward_of(function: Callable[..., object]) -> Callable[..., Any]:
    """The gradients of `function`, as the function of a `JaxKernel`."""

    def backward(args: Any, out: object, cotangents: Any, **options: object) -> Any:
        floats, others = eqx.partition(args, eqx.is_inexact_array)

        def of_floats(floats: Any) -> Any:
            return function(*eqx.combine(floats, others), **options)

        (gradients,) = jax.vjp(of_floats, floats)[1](cotangents)
        return gradients

    return backward
