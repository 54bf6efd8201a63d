"""Products with weights, and rows of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int, Int8, Shaped

from .._precision import wide
from ._reference_activations import quantize_activations


# Rules of JAX get constants as they were given.
_Operand = Array | np.ndarray


def linear(
    x: Float[Array, "*batch in_features"],
    weight: Float[Array, "out_features in_features"],
    bias: Float[Array, " out_features"] | None = None,
) -> Float[Array, "*batch out_features"]:
    dtype = wide(x.dtype)
    y = _wide_dot(x, weight)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(dtype), y.shape)
    return y.astype(x.dtype)


def embedding(index: Int[Array, "*batch"], weight: Shaped[Array, "rows size"]) -> Shaped[Array, "*batch size"]:
    floating = jnp.issubdtype(weight.dtype, jnp.floating)
    narrow = floating and wide(weight.dtype) != weight.dtype
    # One index alone would be a slice, whose gradient JAX gives to the last row if the index is out of range.
    indices = index.reshape(-1)
    rows = _narrow_rows(indices, weight) if narrow else weight[indices]
    return rows.reshape(*index.shape, weight.shape[1])


def _dot(x: _Operand, weight: _Operand, dtype: Any) -> Array:
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, axes, preferred_element_type=dtype)


@jax.custom_batching.custom_vmap
def _forward_dot(x: _Operand, weight: _Operand) -> Array:
    return _dot(x, weight, wide(x.dtype))


@_forward_dot.def_vmap
def _batched_forward_dot(axis_size: Any, mapped: Any, x: _Operand, weight: _Operand) -> tuple[Array, bool]:
    if not mapped[1]:
        return _forward_dot(x, weight), True
    if mapped[0]:
        return jax.vmap(lambda x, weight: _dot(x, weight, wide(x.dtype)))(x, weight), True
    # An ensemble of one x. JAX's rule has x first, for which XLA on a CPU transposes all weights before it multiplies.
    axes = (((2,), (x.ndim - 1,)), ((), ()))
    out = jax.lax.dot_general(weight, x, axes, preferred_element_type=wide(x.dtype))
    return jnp.moveaxis(out, 1, -1), True


@jax.custom_jvp
def _wide_dot(x: _Operand, weight: _Operand) -> Array:
    """The sum is not rounded before the bias is added."""
    return _forward_dot(x, weight)


# The derivative that JAX would find multiplies f32 by 16 bits, which processors have no instructions for.
@functools.partial(_wide_dot.defjvp, symbolic_zeros=True)
def _wide_dot_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (x, weight), (x_dot, weight_dot) = primals, tangents
    out = _wide_dot(x, weight)
    tangent = jnp.zeros_like(out)
    if not isinstance(x_dot, SymbolicZero):
        tangent += _dot(x_dot, weight, x.dtype).astype(out.dtype)
    if not isinstance(weight_dot, SymbolicZero):
        tangent += _dot(x, weight_dot, x.dtype).astype(out.dtype)
    return out, tangent


@jax.custom_jvp
def _narrow_rows(index: _Operand, weight: _Operand) -> Array:
    return weight[index]


# What many equal indices add up for one row is a sum, and sums are in f32.
@_narrow_rows.defjvp
def _narrow_rows_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (index, weight), (_, weight_dot) = primals, tangents
    out = _narrow_rows(index, weight)
    return out, weight_dot.astype(wide(weight.dtype))[index].astype(weight.dtype)


def int8_linear(
    x: Float[Array, "*batch in_features"],
    weight: Int8[Array, "out_features in_features"],
    scale: Float[Array, " out_features"],
    *,
    activations: str = "exact",
) -> Float[Array, "*batch out_features"]:
    dtype = wide(x.dtype)
    y = x.astype(dtype) if activations == "exact" else quantize_activations(x.astype(dtype), x.shape[-1])
    out = jnp.einsum("...i,oi->...o", y, weight.astype(dtype), precision=jax.lax.Precision.HIGHEST)
    return (out * jnp.broadcast_to(scale.astype(dtype), out.shape)).astype(x.dtype)
