"""Scaled dot-product attention with grouped queries."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._precision import wide


def attention(
    q: Float[Array, "*batch queries heads size"],
    k: Float[Array, "*batch keys kv_heads size"],
    v: Float[Array, "*batch keys kv_heads size"],
    *,
    causal: bool,
    scale: float,
) -> Array:
    queries, keys = q.shape[-3], k.shape[-3]
    seen = jnp.ones((queries, keys), bool)
    if causal:
        seen = jnp.tri(queries, keys, keys - queries, dtype=bool)
    return _attend(q, k, v, jnp.broadcast_to(seen, (*q.shape[:-3], queries, keys)), scale)


def decode_attention(
    q: Float[Array, "*batch heads size"],
    k: Float[Array, "*batch keys kv_heads size"],
    v: Float[Array, "*batch keys kv_heads size"],
    length: Int[Array, "*batch"],
    *,
    scale: float,
) -> Array:
    keys = k.shape[-3]
    seen = jax.lax.broadcasted_iota(jnp.int32, (*length.shape, 1, keys), length.ndim + 1)
    seen = seen < jnp.broadcast_to(length[..., None, None], seen.shape)
    return jnp.squeeze(_attend(q[..., None, :, :], k, v, seen, scale), axis=-3)


def _attend(q: Array, k: Array, v: Array, seen: Bool[Array, "*batch queries keys"], scale: float) -> Array:
    heads, size = q.shape[-2:]
    kv_heads = k.shape[-2]
    dtype = wide(q.dtype)
    grouped = q.astype(dtype).reshape(*q.shape[:-2], kv_heads, heads // kv_heads, size) * scale
    highest = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("...skgd,...tkd->...kgst", grouped, k.astype(dtype), precision=highest)
    mask = jnp.broadcast_to(seen[..., None, None, :, :], logits.shape)
    highest_logit = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf, where=mask))
    # A query that sees nothing gives zeros, not NaN.
    highest_logit = jnp.where(highest_logit == -jnp.inf, 0.0, highest_logit)
    weights = jnp.exp(jnp.where(mask, logits - highest_logit, -jnp.inf))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1.0, total)
    out = jnp.einsum("...kgst,...tkd->...skgd", weights, v.astype(dtype), precision=highest)
    return out.reshape(q.shape).astype(q.dtype)
