"""Linear layers, and tables of embeddings."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Integer, Shaped

from ...core import AnyArray, Types, check, check_floats, integers
from ...kernel import NativeKernel
from ...transform import Implementation, Op, multiplies_faster
from .._precision import wide
from .._supports import floats
from . import _jax, _numpy, _reference


# With more rows than these, arranging the weights pays.
_FEW_ROWS = 16
# With more than half a megabyte of weights, which are seldom in cache, arranging them takes as long as so many rows.
_ROWS_OF_LARGE, _LARGE = 32, 1 << 19
# A product of fewer numbers takes XLA less time than a call.
_SMALLEST = 1 << 14


def _supports(types: Types, **_: object) -> bool | str:
    """XLA arranges the weights anew for each product of a few rows, and reads 16 bits more slowly than 32 unless it multiplies
    matrices, for which it has instructions."""
    dtype, rows, size = types.x.dtype, math.prod(types.x.shape[:-1]), types.weight.size
    most = _ROWS_OF_LARGE if size * dtype.itemsize > _LARGE else _FEW_ROWS
    # Of bf16 alone: XLA adds a bias to sums of f32 where it next reads them, for nothing.
    if rows > most and not (dtype == jnp.bfloat16 and multiplies_faster(dtype, rows, *types.weight.shape)):
        return f"x can have at most {most} rows, as XLA is faster at products of matrices; it has {rows}"
    if dtype == jnp.float32 and (rows < 2 or size < _SMALLEST):
        return (
            f"x of float32 needs two rows and weights of {_SMALLEST} numbers, else XLA is as fast; "
            f"it has {rows}, and they have {size}"
        )
    return floats(types)


_NATIVE = NativeKernel("linear", attributes=("present",), supports=_supports)
# Any number of rows is right, where a call names the kernel.
_NATIVE_IF_CHOSEN = dataclasses.replace(_NATIVE, supports=floats, only_if_chosen=True)
_linear = Op(
    "linear",
    kernels={"cpu": (_NATIVE, _jax.LINEAR, _NATIVE_IF_CHOSEN, _numpy.LINEAR), "cuda": _numpy.LINEAR},
    reference=_reference.linear,
    vmap_method={"x": "broadcast_all", "weight": "reference", "bias": "reference"},
    backward={"cpu": _jax.LINEAR_BACKWARD},
    backward_reads_results=False,
    sharding="... i, o i, o -> ... o",
)
_embedding = Op(
    "embedding",
    kernels={"cpu": (_jax.EMBEDDING, _numpy.EMBEDDING), "cuda": _numpy.EMBEDDING},
    reference=_reference.embedding,
    vmap_method={"index": "broadcast_all", "weight": "reference"},
    backward={"cpu": _jax.EMBEDDING_BACKWARD},
    backward_reads_results=False,
)


def linear(
    x: Float[AnyArray, "*batch in_features"],
    weight: Float[AnyArray, "out_features in_features"],
    bias: Float[AnyArray, " out_features"] | None = None,
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch out_features"]:
    r"""$x W^T + b$ over the last axis, summed in f32 and rounded once.

    By default this is a plain product in XLA, which knows them best and fuses what follows. On a CPU at most 16 rows, or 32 if
    the weights have more than half a megabyte, are a kernel, which reads the weights once, at the speed of memory; of f32 if
    they are two or more, with weights of 16,384 numbers or more. More rows of bf16, and their gradients, are written in the way
    that XLA has the processor's instructions for bf16 multiply, or f32 where the machine has measured that to be faster; on
    processors with AVX-512 or AMX they are kernels. There gradients of weights in f32 are kernels too, and products in f32 with a
    large result, or with AMX all.

    **Arguments:**

    - `x`: an array of shape `(*batch, in_features)`.
    - `weight`: $W$, of shape `(out_features, in_features)` and the dtype of `x`.
    - `bias`: $b$, of shape `(out_features,)`.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of shape `(*batch, out_features)` and the dtype of `x`.

    Derivatives of f16 and bf16 are products of 16 bits, summed in f32.
    """
    x, weight = jnp.asarray(x), jnp.asarray(weight)
    check_floats("linear", x=x, weight=weight)
    fits = x.ndim > 0 and weight.ndim == 2 and weight.shape[-1] == x.shape[-1]
    check(fits, "linear", "weight of shape (out_features, in_features) for the last axis of x", x=x, weight=weight)
    if bias is not None:
        bias = jnp.asarray(bias)
        check_floats("linear", bias=bias)
        check(bias.shape == weight.shape[:1], "linear", "bias of shape (out_features,)", bias=bias, weight=weight)
        bias = bias.astype(wide(x.dtype))
    return _linear.using(implementation)(x, weight, bias)


def embedding(
    index: Integer[ArrayLike, "*batch"],
    weight: Shaped[AnyArray, "rows size"],
    *,
    implementation: Implementation = "auto",
) -> Shaped[Array, "*batch size"]:
    """`weight[index]`.

    **Arguments:**

    - `index`: integers of any shape. A negative one counts from the end. One that is out of range is clamped, as always when
        `jax.numpy` reads.
    - `weight`: the table, of shape `(rows, size)`, of any dtype.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of shape `(*batch, size)` and the dtype of `weight`.

    The gradient of a table in f16 or bf16 is summed in f32.
    """
    weight = jnp.asarray(weight)
    check(weight.ndim == 2, "embedding", "weight of shape (rows, size)", weight=weight)
    index = integers("embedding", "index", index, jnp.shape(index))
    return _embedding.using(implementation)(index, weight)
