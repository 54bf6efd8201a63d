"""Linear layers, and tables of embeddings."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from .. import reference
from .._checks import check, check_floats, integers
from ..kernel import NativeKernel
from ..kernels import host
from ..op import Implementation, Op
from ._run import run


# Of more rows than these, weights that are in cache are worth more than memory that is read once.
_FEW_ROWS = 16


def _is_for_kernel(x: Any, weight: Any, bias: Any = None) -> bool:
    """XLA reads 16 bits more slowly than 32 unless it multiplies matrices, for which it has instructions."""
    del weight, bias
    return math.prod(x.shape[:-1]) <= _FEW_ROWS


_linear = Op(
    "linear",
    kernels={"cpu": NativeKernel("linear")},
    reference=reference.linear,
    batching={"x": "batched", "weight": "shared", "bias": "shared"},
    alternatives={"cpu": (host.LINEAR,), "cuda": (host.LINEAR,)},
    sharding="... i, o i, o -> ... o",
    when=_is_for_kernel,
)
_linear_without_bias = dataclasses.replace(_linear, sharding="... i, o i -> ... o")
# The table first: its dtype is the one that says whether a kernel knows it.
_embedding = Op(
    "embedding",
    kernels={},
    reference=lambda weight, index: reference.embedding(index, weight),
    batching={"weight": "shared", "index": "batched"},
    alternatives={"cpu": (host.EMBEDDING,), "cuda": (host.EMBEDDING,)},
)


def linear(
    x: Float[Array, "*batch in_features"],
    weight: Float[Array, "out_features in_features"],
    bias: Float[Array, " out_features"] | None = None,
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch out_features"]:
    r"""$x W^T + b$ over the last axis, summed in f32 and rounded once.

    By default this is a plain product in XLA, which knows them best and fuses what follows; on a CPU, at most 16 rows of f16 or
    bf16 are a kernel, which reads the weights once, at the speed of memory.

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
        bias = bias.astype(reference.wide(x.dtype))
    if implementation == "auto" and x.dtype.itemsize != 2:
        # A plain product, which XLA fuses with what follows: there is no kernel for 32 bits.
        implementation = "reference"
    if bias is None:
        return run(_linear_without_bias, x, weight, implementation=implementation)
    return run(_linear, x, weight, bias, implementation=implementation)


def embedding(
    index: Int[ArrayLike, "*batch"], weight: Float[Array, "rows size"], *, implementation: Implementation = "auto"
) -> Float[Array, "*batch size"]:
    """`weight[index]`.

    **Arguments:**

    - `index`: integers of any shape. A negative one counts from the end. One that is out of range is clamped, as always when
        `jax.numpy` reads.
    - `weight`: the table, of shape `(rows, size)`, of any dtype.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of shape `(*batch, size)` and the dtype of `weight`.

    The gradient of a table in f16 or bf16 is summed in f32.
    """
    index, weight = jnp.asarray(index), jnp.asarray(weight)
    check(weight.ndim == 2, "embedding", "weight of shape (rows, size)", weight=weight)
    index = integers("embedding", "index", index, index.shape)
    return run(_embedding, weight, index, implementation=implementation)
