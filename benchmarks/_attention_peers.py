"""Attention as peers have it, of whole sequences: what XLA makes of several formulations, Equinox's core, and PyTorch's."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

# Equinox's attention without its projections, which has no public name.
from equinox.nn._attention import dot_product_attention

from ._contestants import torch


def seen(queries: int, keys: int) -> jax.Array:
    return jnp.tril(jnp.ones((queries, keys), bool), keys - queries)


def heads_inside(causal: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The axes as they come."""
    batch, queries, _, size = q.shape
    grouped = q.reshape(batch, queries, k.shape[2], -1, size)
    logits = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k, preferred_element_type=jnp.float32) / math.sqrt(size)
    weights = _softmax(logits, causal).astype(q.dtype)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(q.shape)


def heads_first(causal: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Transposed, and as products of matrices. Queries that share keys are rows of one matrix."""
    batch, queries, heads, size = q.shape
    kv_heads, group = k.shape[2], heads // k.shape[2]
    rows = q.reshape(batch, queries, kv_heads, group, size).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, group * queries, size) / math.sqrt(size)
    logits = jnp.matmul(rows, k.transpose(0, 2, 3, 1), preferred_element_type=jnp.float32)
    logits = logits.reshape(batch, kv_heads, group, queries, -1)
    weights = _softmax(logits, causal).astype(q.dtype).reshape(batch, kv_heads, group * queries, -1)
    out = jnp.matmul(weights, v.swapaxes(1, 2)).reshape(batch, kv_heads, group, queries, size)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _softmax(logits: jax.Array, causal: bool) -> jax.Array:
    if causal:
        logits = jnp.where(jnp.broadcast_to(seen(*logits.shape[-2:]), logits.shape), logits, -jnp.inf)
    return jax.nn.softmax(logits, -1)


def head_by_head(causal: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attend with one head after another, so that the memory of one head stays in the caches."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    heads = [x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (q, k, v)]

    def head(operands: tuple[jax.Array, ...]) -> jax.Array:
        return heads_inside(causal, *(x[None, :, None] for x in operands))[0, :, 0]

    out = jax.lax.map(head, tuple(heads))
    return out.reshape(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).swapaxes(1, 2)


def equinox(mask: jax.Array | None, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    core = functools.partial(dot_product_attention, mask=mask)
    return jax.vmap(jax.vmap(core, in_axes=1, out_axes=1))(q, k, v)


def of_torch(options: dict[str, Any], *qkv: Any) -> Any:
    """PyTorch's, which has heads first."""
    attend = torch().nn.functional.scaled_dot_product_attention
    return attend(*(x.transpose(1, 2) for x in qkv), **options).transpose(1, 2)
