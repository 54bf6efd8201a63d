"""Attention by cuDNN, for the calls that it takes and where it is the fastest."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ...core import Types
from ...kernel import JaxKernel
from ...transform import cudnn_attention, cudnn_attention_backward, why_no_cudnn
from ._jax import with_axes_of
from ._operands import OPTIONAL
from ._triton import FEW_QUERIES


_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
# Our kernel divides the keys of fewer queries among programs.
_LEAST_QUERIES = FEW_QUERIES + 1
# Heads that cuDNN takes on every GPU since compute capability 8.0.
_MOST_SIZE, _MULTIPLE_OF_SIZE = 128, 8
# Additions and multiplications of the value. Measured on an H100 in bf16, our Triton / cuDNN 9.19, causal unless it says
# otherwise: 4 examples of 4,096 tokens and 16 heads of 128 (275e9) 417 / 533 TFLOP/s, not causal 461 / 626; with a window of a
# quarter (137e9) 385 / 295 us; 4 of 2,048 and 32 heads, 8 of keys (137e9), 376 / 307 us; 8 of 1,024 and 32 heads of 64 (34e9)
# 133 / 125 us, not causal 186.4 / 186.3; with the host's time, of which cuDNN takes more, 16 of 512 and 16 heads of 128 (17e9)
# 97 / 151 us, 1 of 1,024 (4e9) 67 / 116, 64 of 128 and heads of 64 (at most 4e9) 70 / 134. With the gradients, in TFLOP/s: from
# 199 / 201 to 330 / 450 for the large ones, and then 142.8 / 140.5, 105 / 44, 91 / 47.
LEAST_OPERATIONS = 30e9


def _supports(types: Types, **options: Any) -> bool | str:
    reason = _why_not(types, **options) or why_no_cudnn()
    return True if reason is None else f"cuDNN: {reason}"


def _why_not(types: Types, *, causal: bool, scale: float, window: int, soft_cap: float, dropout: float) -> str | None:
    q, (k, v), *optional = types
    for name, x in zip(OPTIONAL, optional, strict=True):
        if x is not None:
            return f"it has no {name}"
    if soft_cap or dropout:
        return f"it has no {'soft_cap' if soft_cap else 'dropout'}"
    if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        return f"q, k and v have to be bfloat16 or float16, all the same; they are {q.dtype}, {k.dtype} and {v.dtype}"
    (*_, queries, heads, size), (*_, keys, kv_heads, _) = q.shape, k.shape
    if size % _MULTIPLE_OF_SIZE or size > _MOST_SIZE:
        return f"heads have to be a multiple of {_MULTIPLE_OF_SIZE} and no longer than {_MOST_SIZE}; they are {size}"
    if 0 in q.shape or 0 in k.shape:
        return f"no array may be empty; q has the shape {q.shape}, and k {k.shape}"
    if queries < _LEAST_QUERIES:
        return f"there have to be {_LEAST_QUERIES} queries or more; there are {queries}"
    if causal and queries != keys:
        return f"under causal it sees the first key with the first query; there are {queries} queries, and {keys} keys"
    if window and not causal:
        return "a window has to be causal"
    if scale <= 0:
        return f"scale has to be positive; it is {scale}"
    if len(k.shape) < len(q.shape) and keys * kv_heads > queries * heads:
        return "keys and values that several examples share would be copied for each, and are larger than the queries"
    operations = _operations(q.shape, keys, causal=causal, window=window)
    if operations < LEAST_OPERATIONS:
        return f"it is the faster one from {LEAST_OPERATIONS:.3g} operations on; there are {operations:.3g}"
    return None


def _operations(queries: Sequence[int], keys: int, *, causal: bool, window: int) -> float:
    """Return the additions and multiplications of the value's products. **Arguments:** `queries`: the shape of `q`."""
    seen = keys / 2 if causal else keys
    return 4.0 * math.prod(queries) * (min(window, seen) if window else seen)


def _folded(x: Array) -> Array:
    """With one batch axis."""
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _options(kv: Sequence[Array], *, causal: bool, scale: float, window: int, **_: object) -> dict[str, Any]:
    """Return the options of cuDNN. A window at least as long as the keys hides nothing, and is left out."""
    return {"causal": causal, "scale": scale, "window": window if 0 < window < kv[0].shape[-3] else None}


def attention_by_cudnn(q: Array, kv: Sequence[Array], *optional: Array | None, **options: Any) -> tuple[Array, Array]:
    k, v = with_axes_of(q, kv)
    out, lse = cudnn_attention(_folded(q), _folded(k), _folded(v), **_options(kv, **options))
    return out.reshape(q.shape), jnp.swapaxes(lse, -1, -2).reshape(q.shape[:-1])


def gradients_by_cudnn(
    args: Sequence[Any], results: Sequence[Array], cotangents: Sequence[Array], **options: Any
) -> Any:
    """Return the gradients of the value alone: cuDNN takes no cotangent of the log-sum-exp."""
    q, kv, *optional = args
    k, v = with_axes_of(q, kv)
    out, lse = results
    lse = jnp.swapaxes(lse.reshape(-1, *lse.shape[-2:]), -1, -2)
    arrays = (_folded(q), _folded(k), _folded(v), _folded(out), lse, _folded(cotangents[0]))
    dq, dk, dv = cudnn_attention_backward(*arrays, **_options(kv, **options))
    return (dq.reshape(q.shape), (dk.reshape(k.shape), dv.reshape(v.shape)), *[None] * len(optional))


ATTENTION = JaxKernel(attention_by_cudnn, supports=_supports)
VALUE_BACKWARD = JaxKernel(gradients_by_cudnn, supports=_supports)
