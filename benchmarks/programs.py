"""Programs of one op each, whose plans by XLA for a GPU benchmarks compare and tests read."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eqxcallback import ops
from eqxcallback.ops.attention import (
    _cuda as decode_cuda,
    _cuda_decode_mma as decode_mma_cuda,
    _decode as decode_ops,
    _triton as attention_triton,
)
from eqxcallback.ops.linear import _cuda as linear_cuda, _quantized as quantized_ops


# `eqxcallback.ops.attention` is the function as well, which hides the module.
attention_ops = importlib.import_module("eqxcallback.ops.attention._attention")


class Program(NamedTuple):
    """`function(*args)`, where `args` are types.

    **Attributes:**

    - `donated`: the operands whose memory results may take.
    - `differentiable`: the operands that a kernel computes the gradients of, or none.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    differentiable: tuple[int, ...] = ()

    @property
    def gradients(self) -> "Program":
        def loss(*args: Any) -> jax.Array:
            return (self.function(*args).astype(jnp.float32) ** 2).sum()

        return Program(jax.grad(loss, self.differentiable), self.args)


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _alone(op: Any, kernel: Any) -> Any:
    """`op` with this kernel alone on a GPU."""
    kernels: Any = {**op.kernels, "cuda": dataclasses.replace(kernel, only_if_chosen=False)}
    return dataclasses.replace(op, kernels=kernels)


_BY_TRITON = _alone(attention_ops._attention, attention_triton.ATTENTION)
_PLAIN_DECODE = _alone(decode_ops._decode_attention, decode_cuda.DECODE_ATTENTION)


def _attention(q: Any, k: Any, v: Any) -> jax.Array:
    """Causal `ops.attention`, not by cuDNN."""
    options = {"causal": True, "scale": q.shape[-1] ** -0.5, "window": 0, "soft_cap": 0.0, "dropout": 0.0}
    return _BY_TRITON(q, (k, v), **options)[0]


def _attention_with_bias(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
    return ops.attention(q, k, v, bias=bias)


def _attention_with_slopes(q: Any, k: Any, v: Any, slopes: Any) -> jax.Array:
    return ops.attention(q, k, v, causal=True, alibi_slopes=slopes)


def _add_rms_norm(x: Any, residual: Any, weight: Any) -> jax.Array:
    return jnp.stack(ops.add_rms_norm(x, residual, weight))


def _group_norm(x: Any, weight: Any, bias: Any) -> jax.Array:
    return ops.group_norm(x, weight, bias, groups=4)


def _lstm_gates(gates: Any, cell: Any) -> jax.Array:
    return jnp.stack(ops.lstm_gates(gates, cell))


def _quantized_linear_swiglu(x: Any, blocks: Any) -> jax.Array:
    return ops.quantized_linear_swiglu(x, blocks, encoding="Q4_1")


_BY_TENSOR_CORES = dataclasses.replace(
    decode_ops._decode_attention, kernels={"cuda": decode_mma_cuda.DECODE_ATTENTION_MMA}, backward=None
)


def decode_by_tensor_cores(q: Any, k: Any, v: Any, length: Any, *scales: Any) -> jax.Array:
    """`ops.decode_attention` with that kernel alone. `scales`: of a cache in int8."""
    options = {"scale": q.shape[-1] ** -0.5, "window": 0, "soft_cap": 0.0}
    return _BY_TENSOR_CORES(q, (k, v), length, None, *(scales or (None, None)), **options)


def decode_by_the_plain_kernel(
    q: Any, k: Any, v: Any, length: Any, slopes: Any = None, *scales: Any, window: int = 0, soft_cap: float = 0.0
) -> jax.Array:
    """`ops.decode_attention`, not by tensor cores."""
    options = {"scale": q.shape[-1] ** -0.5, "window": window, "soft_cap": soft_cap}
    return _PLAIN_DECODE(q, (k, v), length, slopes, *(scales or (None, None)), **options)


def quantized_linear_by(kernel: Any, encoding: Any) -> Callable[..., jax.Array]:
    """`ops.quantized_linear` with this kernel alone on a GPU."""
    alone = _alone(quantized_ops._quantized_linear, kernel)
    return lambda x, blocks: alone(x, blocks, encoding=encoding, activations="exact")


_quantized_linear = functools.partial(quantized_linear_by, linear_cuda.QUANTIZED_LINEAR)
quantized_linear_by_tensor_cores = functools.partial(quantized_linear_by, linear_cuda.QUANTIZED_LINEAR_MMA)


_WEIGHT, _TABLE = struct(576, dtype=jnp.float32), struct(5, 32, dtype=jnp.float32)
_CACHE, _INDEX, _LABELS = struct(2, 256, 2, 64), struct(2, dtype=jnp.int32), struct(8, dtype=jnp.int32)
_Q4_1, _Q8_0 = struct(576, 360, dtype=jnp.uint8), struct(576, 612, dtype=jnp.uint8)

PROGRAMS = {
    "rms_norm": Program(ops.rms_norm, (struct(8, 576), _WEIGHT), differentiable=(0, 1)),
    "layer_norm": Program(ops.layer_norm, (struct(8, 576), _WEIGHT, _WEIGHT), differentiable=(0, 1, 2)),
    "add_rms_norm": Program(_add_rms_norm, (struct(8, 576), struct(8, 576), _WEIGHT), differentiable=(0, 1, 2)),
    "group_norm": Program(
        _group_norm, (struct(2, 32, 64), *2 * [struct(32, dtype=jnp.float32)]), differentiable=(0, 1, 2)
    ),
    "group_norm in parts": Program(
        _group_norm, (struct(1, 32, 4096), *2 * [struct(32, dtype=jnp.float32)]), differentiable=(0, 1, 2)
    ),
    "rotary_embedding": Program(ops.rotary_embedding, (struct(2, 5, 8, 64), _TABLE, _TABLE), differentiable=(0, 1, 2)),
    "swiglu": Program(ops.swiglu, (struct(8, 1536), struct(8, 1536)), differentiable=(0, 1)),
    "swiglu packed": Program(ops.swiglu, (struct(8, 3072),), differentiable=(0,)),
    "softmax_cross_entropy": Program(ops.softmax_cross_entropy, (struct(8, 1000), _LABELS), differentiable=(0,)),
    "softmax_cross_entropy targets": Program(
        ops.softmax_cross_entropy, (struct(8, 1000), struct(8, 1000)), differentiable=(0, 1)
    ),
    "softmax": Program(ops.softmax, (struct(8, 1000), struct(1000, dtype=jnp.bool_)), differentiable=(0,)),
    "attention": Program(_attention, (struct(2, 256, 6, 64), _CACHE, _CACHE), differentiable=(0, 1, 2)),
    "attention with bias": Program(
        _attention_with_bias,
        (struct(2, 256, 6, 64), _CACHE, _CACHE, struct(6, 256, 256)),
        differentiable=(0, 1, 2, 3),
    ),
    "attention with slopes": Program(
        _attention_with_slopes,
        (struct(2, 256, 6, 64), _CACHE, _CACHE, struct(6, dtype=jnp.float32)),
        differentiable=(0, 1, 2, 3),
    ),
    "attention of few queries": Program(_attention, (struct(2, 8, 6, 64), *2 * [struct(2, 1024, 2, 64)])),
    "lstm_gates": Program(_lstm_gates, (struct(8, 1024), struct(8, 256)), differentiable=(0, 1)),
    "gru_gates": Program(
        ops.gru_gates,
        (struct(8, 768), struct(8, 768), struct(8, 256), struct(256, dtype=jnp.float32)),
        differentiable=(0, 1, 2, 3),
    ),
    "decode_attention": Program(
        decode_by_the_plain_kernel, (struct(2, 6, 64), _CACHE, _CACHE, _INDEX), differentiable=(0, 1, 2)
    ),
    "cache_append": Program(
        ops.cache_append, (struct(256, 2, 64), struct(1, 2, 64), struct(dtype=jnp.int32)), donated=(0,)
    ),
    "rotary_append": Program(
        ops.rotary_append,
        (
            struct(1, 10, 64),
            *2 * [struct(1, 32, dtype=jnp.float32)],
            *2 * [struct(256, 2, 64)],
            struct(dtype=jnp.int32),
        ),
        donated=(3, 4),
    ),
    "quantized_linear Q4_1": Program(_quantized_linear("Q4_1"), (struct(1, 576), _Q4_1)),
    "quantized_linear Q8_0": Program(_quantized_linear("Q8_0"), (struct(8, 576), _Q8_0)),
    "quantized_linear Q4_K": Program(_quantized_linear("Q4_K"), (struct(1, 512), struct(576, 288, dtype=jnp.uint8))),
    "quantized_linear Q6_K": Program(_quantized_linear("Q6_K"), (struct(1, 512), struct(576, 420, dtype=jnp.uint8))),
    "quantized_linear_swiglu Q4_1": Program(_quantized_linear_swiglu, (struct(1, 576), _Q4_1)),
}

# Of the same calls, where they are large.
BY_TENSOR_CORES = {
    "decode_attention by tensor cores": PROGRAMS["decode_attention"]._replace(
        function=decode_by_tensor_cores, differentiable=()
    ),
    "quantized_linear by tensor cores Q4_1": Program(
        quantized_linear_by_tensor_cores("Q4_1"), (struct(8, 512), struct(576, 320, dtype=jnp.uint8))
    ),
}
