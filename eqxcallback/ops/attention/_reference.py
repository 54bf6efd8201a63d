"""Scaled dot-product attention with grouped queries."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, UInt32

from .._precision import wide
from ._reference_dropout import kept as rows_kept


def _wide_logits(
    q: Float[Array, "*batch queries kv_heads group size"], k: Float[Array, "*batch keys kv_heads size"], scale: float
) -> Float[Array, "*batch kv_heads group queries keys"]:
    return jnp.einsum("...skgd,...tkd->...kgst", q.astype(k.dtype) * scale, k, precision=jax.lax.Precision.HIGHEST)


def _wide_values(
    weights: Float[Array, "*batch kv_heads group queries keys"], v: Float[Array, "*batch keys kv_heads size"]
) -> Float[Array, "*batch queries kv_heads group size"]:
    return jnp.einsum("...kgst,...tkd->...skgd", weights, v, precision=jax.lax.Precision.HIGHEST)


# The two products: logits from queries and keys, and results from weights and values.
_WIDE = (_wide_logits, _wide_values)

# Queries at a time: what is kept of them is ROWS x keys, in the value and in its derivatives.
ROWS = 64


def attention(*args: Any, **options: Any) -> Float[Array, "*batch queries heads size"]:
    return attention_with_lse(*args, **options)[0]


def attention_with_lse(
    q: Float[Array, "*batch queries heads size"],
    k: Float[Array, "*batch keys kv_heads size"],
    v: Float[Array, "*batch keys kv_heads size"],
    bias: Float[Array, "*#batch #heads #queries keys"] | None = None,
    mask: Bool[Array, "*#batch #heads #queries keys"] | None = None,
    alibi_slopes: Float[Array, "*#batch heads"] | None = None,
    segment_ids: tuple[Int[Array, "*#batch queries"], Int[Array, "*#batch keys"]] | None = None,
    lengths: Int[Array, "*#batch"] | None = None,
    offset: Int[Array, "*#batch"] | None = None,
    dropout_keys: UInt32[Array, "*#batch heads 2"] | None = None,
    kept: Bool[Array, "*#batch heads queries keys"] | None = None,
    *,
    causal: bool,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    dropout: float = 0.0,
    products: tuple[Callable[..., Array], Callable[..., Array]] = _WIDE,
    rows: int = ROWS,
) -> tuple[Float[Array, "*batch queries heads size"], Float[Array, "*batch queries heads"]]:
    """The result, and the log-sum-exp of the logits. `window` and `soft_cap` of 0 are none. With `dropout`, either
    `dropout_keys` or `kept` says which weights stay. `products` and `rows` at a time are for others than the definition.
    """
    queries, keys = q.shape[-3], k.shape[-3]
    ids, key_ids = (None, None) if segment_ids is None else segment_ids
    dtype = wide(q.dtype)
    k, v = k.astype(dtype), v.astype(dtype)
    if lengths is not None:  # whatever else is there: a weight of zero would not hide NaN
        index = jax.lax.broadcasted_iota(jnp.int32, (*[1] * lengths.ndim, keys, 1, 1), lengths.ndim)
        filled = index < lengths[..., None, None, None]
        k, v = jnp.where(filled, k, 0.0), jnp.where(filled, v, 0.0)

    def block(first, q, bias, mask, ids, kept):
        rows, shape = q.shape[-3], (*q.shape[:-3], q.shape[-2], q.shape[-3], keys)
        index = first + jnp.arange(rows, dtype=jnp.int32)
        start = jnp.int32(keys - queries) if offset is None else offset[..., None]
        places = (*start.shape[:-1], rows)
        query = jnp.broadcast_to(start, places) + _to(index, places)
        away = _to(query[..., None, :, None], shape) - jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
        seen = _to(jnp.ones((), bool), shape) if mask is None else _to(mask, shape)
        if causal:
            seen &= away >= 0
        if window:
            seen &= away < window
            if not causal:
                seen &= away > -window
        if ids is not None and key_ids is not None:
            seen &= _to(ids[..., None, :, None], shape) == _to(key_ids[..., None, None, :], shape)
        if lengths is not None:
            key = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
            seen &= key < _to(lengths[..., None, None, None], shape)
        terms = [] if bias is None else [_to(bias.astype(dtype), shape)]
        if alibi_slopes is not None:
            terms.append(_to(-alibi_slopes.astype(dtype)[..., None, None], shape) * jnp.abs(away).astype(dtype))
        if dropout_keys is not None:
            kept = rows_kept(dropout_keys, index, keys, dropout)
        return _attend(q, k, v, seen, scale, soft_cap, terms, kept, dropout, products)

    count = max(-(-queries // rows), 1)
    if count == 1:
        return block(jnp.int32(0), q, bias, mask, ids, kept)
    rows = -(-queries // count)

    def split(x, axis):
        """Blocks of rows, in front. The last one may end with zeros, whose results nobody reads."""
        if x is None:
            return None
        axis += x.ndim
        padding = [(0, count * rows - queries if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, padding).reshape(*x.shape[:axis], count, rows, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    # All blocks have the row that queries share. Its gradient is rounded after it has been added up.
    row = {
        name: x if x.dtype == jnp.bool_ else x.astype(dtype)
        for name, x in (("bias", bias), ("mask", mask))
        if x is not None and x.shape[-2] != queries
    }
    per_row = {
        "q": split(q, -3),
        "bias": None if "bias" in row else split(bias, -2),
        "mask": None if "mask" in row else split(mask, -2),
        "ids": split(ids, -1),
        "kept": split(kept, -2),
    }
    # Twice: the first derivative uses up one of them, and the second would keep what it computes.
    for _ in range(2):
        block = jax.checkpoint(block, prevent_cse=False)
    firsts = rows * jnp.arange(count, dtype=jnp.int32)
    blocks = jax.lax.map(lambda x: block(x[0], **x[1] | row), (firsts, per_row))

    def join(x: Array, axis: int) -> Array:
        x = jnp.moveaxis(x, 0, axis - 1)
        x = x.reshape(*x.shape[: axis - 1], count * rows, *x.shape[axis + 1 :])
        return jax.lax.slice_in_dim(x, 0, queries, axis=axis)

    return join(blocks[0], -3), join(blocks[1], -2)


def decode_attention(
    q: Float[Array, "*batch heads size"],
    k: Float[Array, "*batch keys kv_heads size"] | Int8[Array, "*batch keys kv_heads size"],
    v: Float[Array, "*batch keys kv_heads size"] | Int8[Array, "*batch keys kv_heads size"],
    length: Int[Array, "*#batch"],
    alibi_slopes: Float[Array, "*#batch heads"] | None = None,
    k_scale: Float[Array, "*batch keys kv_heads"] | None = None,
    v_scale: Float[Array, "*batch keys kv_heads"] | None = None,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    **more: object,
) -> Array:
    """The query is at the position of the last entry. With scales, `k` and `v` are int8."""
    if k_scale is not None and v_scale is not None:
        k, v = (x.astype(scales.dtype) * scales[..., None] for x, scales in ((k, k_scale), (v, v_scale)))
    length = jnp.clip(length, 0, k.shape[-3])
    out = attention(
        q[..., None, :, :],
        k,
        v,
        alibi_slopes=alibi_slopes,
        lengths=length,
        offset=length - 1,
        causal=False,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        **more,
    )
    return jnp.squeeze(out, axis=-3)


def _to(x: Array, shape: tuple[Any, ...]) -> Array:
    """Aligned at the right end."""
    return jnp.broadcast_to(jnp.expand_dims(x, range(len(shape) - x.ndim)), shape)


def _attend(
    q: Float[Array, "*batch queries heads size"],
    k: Float[Array, "*batch keys kv_heads size"],
    v: Float[Array, "*batch keys kv_heads size"],
    seen: Bool[Array, "*batch heads queries keys"],
    scale: float,
    soft_cap: float,
    terms: list[Array],
    kept: Bool[Array, "*#batch heads queries keys"] | None,
    dropout: float,
    products: tuple[Callable[..., Array], Callable[..., Array]],
) -> tuple[Array, Array]:
    heads, size = q.shape[-2:]
    kv_heads, keys = k.shape[-2], k.shape[-3]
    group = (kv_heads, heads // kv_heads) if kv_heads else (0, 0)
    logits_of, values_of = products
    logits = logits_of(q.reshape(*q.shape[:-2], *group, size), k, scale).reshape(seen.shape)
    if soft_cap:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    for term in terms:
        logits = logits + term
    highest_logit = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf, where=seen))
    # A query that sees nothing gives zeros, not NaN.
    highest_logit = jnp.where(highest_logit == -jnp.inf, 0.0, highest_logit)
    weights = jnp.exp(jnp.where(seen, logits - highest_logit, -jnp.inf))
    total = weights.sum(axis=-1, keepdims=True)
    nothing, total = total == 0, jnp.where(total == 0, 1.0, total)
    lse = jnp.where(nothing, -jnp.inf, highest_logit + jnp.log(total))
    weights = weights / total
    if kept is not None:
        weights = jnp.where(kept, weights / (1 - dropout), 0.0)
    weights = weights.reshape(*q.shape[:-3], *group, q.shape[-3], keys)
    return values_of(weights, v).reshape(q.shape).astype(q.dtype), jnp.swapaxes(lse[..., 0], -1, -2)
