"""cuDNN's attention as JAX calls it, for one device: with the log-sum-exp in f32, and with its gradients as a function."""

import functools
import importlib
import inspect
import operator
import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ...core import Value
from ..handles import compute_capabilities


# `_dot_product_attention_fwd_impl` and `_bwd_impl`, with the enumerations that they take: `jax.nn.dot_product_attention`
# rounds the log-sum-exp to the dtype of the queries, and has its gradients only together with its value. They are looked up
# when they are needed: where they have changed, `why_no_cudnn` says so, and other kernels run.
# Noticed by: tests/xla/test_private_jax.py.
_MODULE = "jax._src.cudnn.fused_attention_stablehlo"

_OPERANDS = ("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets")
_TABLES = ("page_table_k", "page_table_v")
_OPTIONS = ("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length")
_PARAMETERS = {
    "_dot_product_attention_fwd_impl": (*_OPERANDS, *_TABLES, *_OPTIONS, "is_training"),
    "_dot_product_attention_bwd_impl": (
        *(*_OPERANDS, *_TABLES),
        *("activation", "fwd_output", "grad_output"),
        *_OPTIONS,
    ),
    "check_cudnn_version": (),
}

# Since JAX 0.12 both take a function that changes scores too. We give none.
_NO_SCORE_FUNCTION = {"score_mod_args": (), "score_mod": None}

_MEMBERS = ("MaskType.NO_MASK", "MaskType.CAUSAL", "AttentionLayout.BTNH.value")

# What they call in a program.
CUDNN_TARGETS = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")

# cuDNN's versions are such numbers: 91900 is 9.19.0. The oldest is the first with windows; JAX asks for the other on such a GPU.
_OLDEST = 90200
_OLDEST_BY_CAPABILITY = {103: 91100}
_LEAST_CAPABILITY = 80


def why_no_cudnn() -> str | None:
    """Why no program that is lowered now can call cuDNN's attention, or `None` where one can."""
    if os.environ.get("EQXCALLBACK_CUDA_ARCH"):
        return "EQXCALLBACK_CUDA_ARCH describes the GPU, and not whether it has cuDNN"
    capabilities = compute_capabilities()
    if not capabilities:
        return "this process has no GPU"
    if min(capabilities) < _LEAST_CAPABILITY:
        return f"the compute capability has to be 8.0 or more; it is {_decimal(min(capabilities), 10)}"
    if (reason := _why_changed()) is not None:
        return reason
    try:
        version = _fused().check_cudnn_version()
    except RuntimeError as error:
        return f"JAX does not find cuDNN ({error})"
    oldest = max(_OLDEST, *(_OLDEST_BY_CAPABILITY.get(capability, 0) for capability in capabilities))
    if version < oldest:
        return f"cuDNN has to be {_version(oldest)} or newer; it is {_version(version)}"
    return None


def _decimal(number: int, base: int) -> str:
    return f"{number // base}.{number % base}"


def _version(number: int) -> str:
    return f"{number // 10_000}.{_decimal(number % 10_000, 100)}"


def _fused() -> Any:
    return importlib.import_module(_MODULE)


@functools.cache
def _why_changed() -> str | None:
    """Why what is called of JAX is not there, or `None`."""
    try:
        module = _fused()
        operator.attrgetter(*_MEMBERS)(module)
        for name, expected in _PARAMETERS.items():
            found = _parameters(getattr(module, name))
            if tuple(p for p in found if p not in _NO_SCORE_FUNCTION) != expected:
                return f"JAX's {name} has other parameters than are known: {', '.join(found)}"
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"JAX has it elsewhere ({error})"
    return None


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def cudnn_attention(
    q: Value, k: Value, v: Value, *, scale: float, causal: bool, window: int | None
) -> tuple[Value, Value]:
    """**Arguments:**

    - `q`: of shape `(batch, queries, heads, size)`, in bf16 or f16.
    - `k`, `v`: of shape `(batch, keys, kv_heads, size)`, in the dtype of `q`.
    - `causal`: whether query `i` sees the keys `j <= i` alone.
    - `window`: and of these the keys `i - window < j`, or all.

    **Returns:** the result, of the type of `q`, and the log-sum-exp of the scaled logits, of shape `(batch, heads, queries)`, in
    f32. JAX has no derivatives of them, and does not map them.
    """
    forward = _fused()._dot_product_attention_fwd_impl
    options = _options(forward, scale, causal, window)
    out, lse = forward(q, k, v, *_absent(q), **options, is_training=True)
    return out, lse


def cudnn_attention_backward(
    q: Value,
    k: Value,
    v: Value,
    out: Value,
    lse: Value,
    cotangent: Value,
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Value, Value, Value]:
    """The gradients of `q`, `k` and `v` from that of `out`. Sums are in any order.

    **Arguments:** those of `cudnn_attention`, what it has returned, and the cotangent of `out`.
    """
    backward = _fused()._dot_product_attention_bwd_impl
    options = _options(backward, scale, causal, window)
    dq, dk, dv = backward(q, k, v, *_absent(q), lse, out, cotangent, **options)
    return dq, dk, dv


def _absent(q: Value) -> list[Value]:
    """Arrays without elements, which JAX has in the places of operands that are not given."""
    return [jnp.zeros(0, q.dtype)] * (len(_OPERANDS) + len(_TABLES) - 3)


def _options(function: Callable[..., Any], scale: float, causal: bool, window: int | None) -> dict[str, Any]:
    module = _fused()
    newer = {p: value for p, value in _NO_SCORE_FUNCTION.items() if p in _parameters(function)}
    return {
        "scale": scale,
        "seed": 0,  # of dropout
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, and no gradient of it
        "mask_type": module.MaskType.CAUSAL if causal else module.MaskType.NO_MASK,
        "layout": module.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
        **newer,
    }
