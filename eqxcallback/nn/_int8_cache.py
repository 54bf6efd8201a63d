"""Keys and values in 8 bits, with a scale for each token and head."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from .. import ops
from ..core import Size


# How many entries are dequantised at a time: in f32 they fit into a core's caches.
_ENTRIES = 512


def quantized(
    x: Float[Array, "count kv_heads size"],
) -> tuple[Int8[Array, "count kv_heads size"], Float[Array, "count kv_heads"]]:
    """`x` as integers from -127 to 127, and their scales: each value errs by at most half a scale."""
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1, initial=0.0) / 127
    steps = jnp.round(wide / jnp.where(scale == 0, 1.0, scale)[..., None])
    return jnp.clip(steps, -127, 127).astype(jnp.int8), scale


def dequantized(x: Int8[Array, "count kv_heads size"], scale: Float[Array, "count kv_heads"]) -> Array:
    return x.astype(jnp.float32) * scale[..., None]


def attention(
    q: Float[Array, "queries heads size"],
    arrays: Sequence[Array],
    *,
    lengths: Int[Array, ""],
    offset: Int[Array, ""],
    **options: Any,
) -> Float[Array, "queries heads size"]:
    """The attention of several tokens, of which some entries at a time are dequantised.

    **Arguments:**

    - `arrays`: keys, values and the scales of both.
    - `lengths`, `offset`, `options`: of [`eqxcallback.ops.attention`][], without `bias` and `mask`.
    """

    def part(start: Size, count: int) -> tuple[Array, Array]:
        k, v, k_scale, v_scale = (jax.lax.dynamic_slice_in_dim(x, start, count) for x in arrays)
        k, v = dequantized(k, k_scale).astype(q.dtype), dequantized(v, v_scale).astype(q.dtype)
        there = {"lengths": jnp.clip(lengths - start, 0, count), "offset": offset - start}
        out, lse = ops.attention_with_lse(q, k, v, **there, **options)
        return out.astype(lse.dtype), lse

    entries = arrays[0].shape[0]
    whole, rest = divmod(entries, _ENTRIES) if isinstance(entries, int) else (0, entries)
    if whole == 0:
        return part(0, rest)[0].astype(q.dtype)
    # Each part subtracts its first entry from the offset, which must not wrap below int32.
    offset = jnp.maximum(offset, jnp.iinfo(jnp.int32).min + entries)

    def add(sofar: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        return _joined(sofar, part(start, _ENTRIES)), None

    starts = jnp.arange(_ENTRIES, whole * _ENTRIES, _ENTRIES, dtype=jnp.int32)
    sofar, _ = jax.lax.scan(add, part(0, _ENTRIES), starts)
    if rest:
        sofar = _joined(sofar, part(whole * _ENTRIES, rest))
    return sofar[0].astype(q.dtype)


def _joined(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Results and log-sum-exps over two parts of the keys as those over both. A query may see no key of a part, or of both."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    largest = jax.lax.stop_gradient(jnp.maximum(lse_a, lse_b))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    weight_a, weight_b = jnp.exp(lse_a - largest), jnp.exp(lse_b - largest)
    total = weight_a + weight_b
    sees = total > 0
    total = jnp.where(sees, total, 1)
    out = (weight_a[..., None] * out_a + weight_b[..., None] * out_b) / total[..., None]
    return out, jnp.where(sees, largest + jnp.log(total), -jnp.inf)
