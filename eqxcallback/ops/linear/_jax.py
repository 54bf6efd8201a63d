"""Products as XLA does them best where there are many rows: on a GPU those with quantised weights, by products of 16 bits, or of
integers, on tensor cores; and on a CPU those of bf16 and their gradients, by the instructions for pairs of bf16, and of f32
where there are tiles of bf16.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ...kernel import JaxKernel
from ...transform import fewest_lines
from .._jax import product, product_of_rows
from .._precision import wide
from .._supports import floats, floats_or_f64
from ._reference_activations import quantize_activations
from ._reference_quantized import dequantize


def _rows_times(x: Array, weight: Array) -> Array:
    return product("...i,oi->...o", x.dtype, x, weight)


def _back(cotangent: Array, weight: Array, x: Array) -> Array:
    return product("...o,oi->...i", x.dtype, cotangent, weight, x.dtype)


def _unscaled(x: Array, weight: Array, activations: str) -> Array:
    """The sums before they are multiplied by the scales of `weight`, which is int8."""
    if activations == "exact":
        return _rows_times(x, weight)
    dtype = wide(x.dtype)
    x = x.astype(dtype)
    highest = jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0.0)
    # Without an inverse a row is zero. Where one is not finite the definition may have an infinity, and this has NaN.
    is_plain = (highest >= 2.0**-100) & jnp.isfinite(highest)
    step = jnp.where(is_plain, highest, 1.0)
    digits = jnp.round(x * (127 / step)).astype(jnp.int8)
    sums = jax.lax.dot_general(
        digits, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    ).astype(dtype)
    return jnp.where(is_plain, sums * (highest / 127), jnp.where(jnp.isfinite(highest), 0.0, jnp.nan))


def _int8_linear(x: Array, weight: Array, scale: Array, *, activations: str) -> Array:
    sums = _unscaled(x, weight, activations)
    return (sums * jnp.broadcast_to(scale, sums.shape)).astype(x.dtype)


def _rounded_int8_linear(x: Array, weight: Array, scale: Array, *, activations: str) -> Array:
    """The same with activations that are rounded and not integers, and that so have derivatives."""
    if activations == "int8":
        x = quantize_activations(x.astype(wide(x.dtype)), x.shape[-1]).astype(x.dtype)
    return _int8_linear(x, weight, scale, activations="exact")


def _int8_linear_backward(args: Any, out: object, cotangent: Array, *, activations: str) -> Any:
    x, weight, scale = args
    cotangent = cotangent.astype(wide(x.dtype))
    d_scale = cotangent * _unscaled(x, weight, activations)
    return _back(cotangent * jnp.broadcast_to(scale, cotangent.shape), weight, x), None, d_scale.sum(range(x.ndim - 1))


def _quantized_linear(x: Array, blocks: Array, *, encoding: str, activations: str) -> Array:
    if activations == "int8":
        x = quantize_activations(x.astype(jnp.float32), 32).astype(x.dtype)
    return _rows_times(x, dequantize(blocks, encoding=encoding)).astype(x.dtype)


def _quantized_linear_backward(args: Any, out: object, cotangent: Array, *, encoding: str, activations: str) -> Any:
    x, blocks = args
    return _back(cotangent, dequantize(blocks, encoding=encoding), x), None


def _has_instructions(types: Any, **_: object) -> bool | str:
    dtype, lines = types.x.dtype, min(math.prod(types.x.shape[:-1]), types.weight.shape[-2])
    fewest = fewest_lines(dtype)
    if dtype == jnp.bfloat16 or (fewest is not None and lines >= fewest):
        return True
    of_f32 = "" if fewest is None else f", or float32 with {fewest} rows and out_features or more"
    return (
        f"x has to be bfloat16{of_f32}, as XLA needs no help with others on this processor; it is {dtype}, and the fewer of both "
        f"are {lines}"
    )


def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    if bias is None:
        return product("...i,oi->...o", x.dtype, x, weight, x.dtype)
    y = _rows_times(x, weight)
    return (y + jnp.broadcast_to(bias, y.shape)).astype(x.dtype)


def _linear_backward(args: Any, out: object, cotangent: Array) -> Any:
    x, weight, bias = args
    d_weight = product_of_rows(x.dtype, cotangent, x, weight.dtype)
    d_bias = None if bias is None else cotangent.astype(bias.dtype).sum(range(x.ndim - 1))
    return _back(cotangent, weight, x), d_weight, d_bias


def _narrow(types: Any, **_: object) -> bool | str:
    dtype = types.weight.dtype
    if not (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2):
        return f"weight has to have 16 bits: the gradients of others are summed where they are; it is {dtype}"
    count, most = types.index.size, types.weight.shape[0] // 2
    return (
        count <= most
        or f"a table in f32 is smaller than more than {most} gradients, sorted and summed; there are {count}"
    )


def _embedding(index: Array, weight: Array) -> Array:
    return weight[index]


def _embedding_backward(args: Any, out: object, cotangent: Array) -> Any:
    """Gradients of the same row are summed in f32 beside each other, so that the whole table need not be in f32."""
    index, weight = args
    num_rows, size = weight.shape
    index = index.ravel()
    count = index.shape[0]
    index = jnp.where(index < 0, index + num_rows, index)
    # As in `jax.numpy`, an index that is out of range gives no gradient.
    index = jnp.where((index >= 0) & (index < num_rows), index, num_rows)
    order = jnp.argsort(index)
    index = index[order]
    place = jnp.cumsum(jnp.diff(index, prepend=-1) != 0) - 1
    sums = jnp.zeros((count, size), jnp.float32)
    sums = sums.at[place].add(cotangent.reshape(count, size)[order].astype(jnp.float32), indices_are_sorted=True)
    rows = jnp.full(count, num_rows).at[place].set(index)
    # As integers: before JAX 0.11 XLA converts a table of 16 bits to f32 and back for this.
    bits = jax.lax.bitcast_convert_type(sums.astype(weight.dtype), jnp.uint16)
    table = jnp.zeros(weight.shape, jnp.uint16).at[rows].set(bits, mode="drop", unique_indices=True)
    return None, jax.lax.bitcast_convert_type(table, weight.dtype)


EMBEDDING = JaxKernel(_embedding, supports=_narrow)
EMBEDDING_BACKWARD = JaxKernel(_embedding_backward, supports=_narrow)
LINEAR = JaxKernel(_linear, supports=_has_instructions, differentiable=_linear)
LINEAR_BACKWARD = JaxKernel(_linear_backward, supports=_has_instructions)
INT8_LINEAR = JaxKernel(_int8_linear, supports=floats_or_f64, differentiable=_rounded_int8_linear)
INT8_LINEAR_BACKWARD = JaxKernel(_int8_linear_backward, supports=floats_or_f64)
QUANTIZED_LINEAR = JaxKernel(_quantized_linear, supports=floats, differentiable=_quantized_linear)
QUANTIZED_LINEAR_BACKWARD = JaxKernel(_quantized_linear_backward, supports=floats)
