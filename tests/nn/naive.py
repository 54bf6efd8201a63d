"""Attention as its formula says, with an array of queries times keys, and what its tests have in common."""

import functools
import math
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def normal(seed, *shape, dtype: Any = np.float32) -> Any:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


quickly_compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


quickly_filter_jitted: Any = functools.partial(eqx.filter_jit, compiler_options={"xla_backend_optimization_level": 0})  # pyright: ignore[reportCallIssue]

# Of `eqxcallback.testing.check`: what is a layer's affair. The others are the op's, and its tests have them.
ROWS = (
    *("types", "stateless", "reference", "jit", "vmap of all", "grad"),
    *("finite differences", "jvp", "hessian", "dtypes", "checkpoint", "scan", "zero size"),
)


def slopes(heads):
    """Return ALiBi's slopes, in the words of its authors' program."""

    def power_of_two(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return power_of_two(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return power_of_two(closest) + power_of_two(2 * closest)[0::2][: heads - closest]


def seen(queries, keys, *, causal=False, window=None, offset=None, length=None, segments=None):
    """Return which keys a query sees, in NumPy."""
    position = np.arange(queries)[:, None] + (keys - queries if offset is None else offset)
    key = np.arange(keys)[None]
    result = np.ones((queries, keys), bool)
    if causal:
        result &= key <= position
    if window is not None:
        result &= (position - key < window) & (key - position < window)
    if length is not None:
        result &= key < length
    if segments is not None:
        of_queries, of_keys = segments
        result &= np.asarray(of_queries)[:, None] == np.asarray(of_keys)[None]
    return result


def attention(
    q,
    k,
    v,
    *,
    scale=None,
    causal=False,
    window=None,
    soft_cap=None,
    bias=None,
    mask=None,
    alibi=None,
    kept=None,
    **which,
):
    """Attend with shapes `(queries, heads, size)` and `(keys, kv_heads, size)`, in f32 or f64. `kept`: factors of the weights."""
    # Without derivatives in NumPy, which compiles nothing.
    xp: Any = jnp if any(isinstance(x, Tracer) for x in (q, k, v, bias, kept)) else np
    queries, heads, size = q.shape
    keys, kv_heads, _ = k.shape
    wide = np.float64 if q.dtype == np.float64 else np.float32
    q, k, v = (xp.asarray(x, wide) for x in (q, k, v))
    k, v = (xp.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    logits = xp.einsum("shd,thd->hst", q, k) * wide(1 / math.sqrt(size) if scale is None else scale)
    if soft_cap is not None:
        logits = wide(soft_cap) * xp.tanh(logits / wide(soft_cap))
    if bias is not None:
        logits = logits + xp.broadcast_to(bias, logits.shape)
    if alibi is not None:
        offset = which.get("offset")
        position = np.arange(queries)[:, None] + (keys - queries if offset is None else offset)
        distance = np.abs(position - np.arange(keys)[None]).astype(wide)
        logits = logits - np.asarray(alibi, wide)[:, None, None] * distance[None]
    visible = np.broadcast_to(seen(queries, keys, causal=causal, window=window, **which)[None], logits.shape)
    if mask is not None:
        visible = visible & np.broadcast_to(mask, logits.shape)
    highest = xp.max(logits, axis=-1, keepdims=True, initial=-1e30, where=visible)
    weights = xp.where(visible, xp.exp(xp.where(visible, logits - highest, wide(0))), wide(0))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / xp.where(total == 0, wide(1), total)
    if kept is not None:
        weights = weights * kept
    return xp.einsum("hst,thd->shd", weights, v)


def copies(text, array):
    """The lines of a compiled program that copy an array of a type, such as `f32[512,2,8]`."""
    return [line for line in text.splitlines() if re.search(r"= \S+ copy(-start)?\(", line) and array in line]


def makers(text, array):
    """The instructions that give arrays of a type. Only calls may, and what passes them on."""
    return set(re.findall(rf"= {re.escape(array)}\S* ([\w-]+)\(", text))
