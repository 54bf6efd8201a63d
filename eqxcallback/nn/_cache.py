"""The keys and values of an attention layer, kept from token to token."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Integer

from .. import ops
from ..core import AnyArray, AnyInt, AnyNumber, DType, Size, Value, check, check_floats, integer, integers, scale_of
from . import _int8_cache, _ring


class KVCache(eqx.Module):
    """Keys and values of the tokens so far, which `append` writes in place.

    In place means: donate the cache to the jitted function that appends to it, or carry it through a loop, and use only what
    comes back. XLA copies a cache that anybody else still needs. A batch of caches is one under `jax.vmap`, with a length for
    each.

    **Attributes:**

    - `k`, `v`: of shape `(entries, kv_heads, size)`.
    - `length`: how many tokens there were so far, int32 of shape `()`.
    - `k_scale`, `v_scale`: of a cache in int8, f32 of shape `(entries, kv_heads)`; else `None`.
    - `window`: of a ring buffer, the number of its entries: token `t` is in entry `t % window`. Else `None`.
    """

    k: Array
    v: Array
    length: Int[Array, ""]
    k_scale: Float[Array, "entries kv_heads"] | None
    v_scale: Float[Array, "entries kv_heads"] | None
    window: int | None = eqx.field(static=True)

    def __init__(
        self,
        max_length: Size,
        kv_heads: Size,
        size: Size,
        dtype: DTypeLike | None = None,
        *,
        window: AnyInt | None = None,
    ):
        """**Arguments:**

        - `max_length`, `kv_heads`, `size`: the shape of keys and values.
        - `dtype`: how they are stored: f32, bf16, f16, or int8 with a scale for each token and head, which is $1/127$ of the
            largest value, so that each value errs by at most half of that. By default JAX's default float.
        - `window`: if it is not larger than `max_length`, the cache is a ring buffer of so many entries, in which a token
            overwrites the one `window` tokens before. It never runs out of room.
        """
        dtype = jnp.dtype(jnp.result_type(float) if dtype is None else dtype)
        if not jnp.issubdtype(dtype, jnp.floating) and dtype != jnp.int8:
            raise ValueError(f"KVCache: expected a floating dtype or int8; got {dtype}.")
        for name, value, least in (("max_length", max_length, 0), ("kv_heads", kv_heads, 1), ("size", size, 0)):
            if not jax.export.is_symbolic_dim(value):
                integer("KVCache", f"{name} to be an integer of at least {least}", value, least=least)
        if window is not None:
            window = integer("KVCache", "a window of at least 1, or None", window, least=1)
        self.window = window if window is not None and window <= max_length else None
        shape = (max_length if self.window is None else self.window, kv_heads, size)
        self.k = jnp.zeros(shape, dtype)
        self.v = jnp.zeros(shape, dtype)
        self.length = jnp.zeros((), jnp.int32)
        self.k_scale, self.v_scale = (
            jnp.zeros(shape[:2], jnp.float32) if dtype == jnp.int8 else None for _ in range(2)
        )

    def append(
        self,
        k: Float[AnyArray, "count kv_heads size"],
        v: Float[AnyArray, "count kv_heads size"],
        *,
        valid: Integer[AnyArray, ""] | AnyInt | None = None,
    ) -> "KVCache":
        """The cache with more tokens.

        There must be room for all of `k`, its padding too: else the last entries are overwritten, and what `attend` gives is
        wrong. A ring buffer always has room.

        **Arguments:**

        - `k`, `v`: of shape `(count, kv_heads, size)`, cast to the cache's dtype.
        - `valid`: how many of them count, by default all. The others are padding: the next `append` overwrites them, and a
            ring buffer does not take them.
        """
        k, v = jnp.asarray(k), jnp.asarray(v)
        who = "KVCache.append"
        self._check_rows(who, k, v)
        return self._append(self._stored(k, v), _valid(who, valid, k.shape[0]))

    def append_rotary(
        self,
        qkv: Float[AnyArray, "count all_heads size"],
        cos: Float[AnyArray, "count half"],
        sin: Float[AnyArray, "count half"],
        *,
        valid: Integer[AnyArray, ""] | AnyInt | None = None,
    ) -> tuple[Float[Array, "count heads size"], "KVCache"]:
        """Rotary position embedding of queries and keys, and `append`, in one pass if the cache is not a ring buffer and has the
        dtype of `qkv`.

        **Arguments:**

        - `qkv`: queries, keys and values side by side, of shape `(count, heads + 2 * kv_heads, size)`.
        - `cos`, `sin`: of [`eqxcallback.ops.rotary_table`][], of shape `(count, size / 2)`.
        - `valid`: as in `append`.

        **Returns:** a tuple of the rotated queries, of shape `(count, heads, size)`, and the cache with more tokens.
        """
        who = "KVCache.append_rotary"
        qkv, kv_heads = jnp.asarray(qkv), self.k.shape[1]
        fits = qkv.ndim == 3 and qkv.shape[1] >= 2 * kv_heads
        check(fits, who, f"qkv of shape (count, heads + {2 * kv_heads}, size)", qkv=qkv)
        heads = qkv.shape[1] - 2 * kv_heads
        k, v = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        self._check_rows(who, k, v)
        kept = _valid(who, valid, qkv.shape[0])
        if self.window is None and self.k.dtype == qkv.dtype:
            q, *written = ops.rotary_append(qkv, cos, sin, self.k, self.v, self.length)
            return q, self._with((*written, None, None), qkv.shape[0], kept)
        qk = ops.rotary_embedding(qkv[:, : heads + kv_heads], cos, sin)
        return qk[:, :heads], self._append(self._stored(qk[:, heads:], v), kept)

    def attend(
        self,
        q: Float[AnyArray, "*queries heads size"],
        *,
        scale: AnyNumber | None = None,
        causal: bool = True,
        window: AnyInt | None = None,
        soft_cap: AnyNumber | None = None,
        alibi_slopes: Float[AnyArray, " heads"] | None = None,
        bias: Float[AnyArray, "#heads queries entries"] | None = None,
        mask: Bool[AnyArray, "#heads queries entries"] | None = None,
        offset: Integer[AnyArray, ""] | AnyInt | None = None,
        implementation: ops.Implementation = "auto",
    ) -> Float[Array, "*queries heads size"]:
        """The attention of the last tokens over the tokens so far, their own included if they have been appended.

        One token costs time that follows the length. A ring buffer serves one token: `update` is for several.

        An int8 cache is a quarter of one in f32. For one token the kernel dequantises its keys and values in registers, and
        for several tokens some entries at a time are dequantised. With a bias or a mask, for derivatives, and for one token
        that sees less of a ring buffer than all, or with slopes, they are dequantised all at once.

        **Arguments:**

        - `q`: of one token, of shape `(heads, size)`, or of several, of shape `(queries, heads, size)`. `heads` is a multiple
            of `kv_heads`. If the cache has another floating dtype, `q` is cast to it, and the result back.
        - `scale`: of the logits, by default $1 / \\sqrt{\\mathrm{size}}$.
        - `causal`, `window`, `soft_cap`, `alibi_slopes`: as in [`eqxcallback.ops.attention`][]. The `window` of a ring buffer is
            its own by default, and no larger.
        - `bias`, `mask`: of shape `(heads or 1, queries, entries)`; not for a ring buffer.
        - `offset`: how many tokens there were before the first of `q`, by default the length less `queries`.
        - `implementation`: of the attention; see [`eqxcallback.Op.using`][].

        **Returns:** an array of the shape and dtype of `q`.
        """
        who = "KVCache.attend"
        q = jnp.asarray(q)
        window = self._window(who, window)
        scale = self._check_queries(who, q, scale)
        options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap, "implementation": implementation}
        count = 1 if q.ndim == 2 else q.shape[0]
        if count == 1 and bias is None and mask is None and offset is None:
            return self._attend_one(q.reshape(q.shape[-2:]), window, alibi_slopes, options).reshape(q.shape)
        if self.window is not None:
            raise ValueError(
                f"{who}: expected one token, without bias, mask or offset, for a ring buffer; got q: "
                f"{jax.typeof(q).str_short()}. Several tokens overwrite what the first of them see: call `update`."
            )
        out = self._attend_several(
            q.reshape(count, *q.shape[-2:]),
            self._arrays,
            causal=causal,
            window=window,
            alibi_slopes=alibi_slopes,
            bias=bias,
            mask=mask,
            lengths=self.length,
            offset=self.length - count if offset is None else integers(who, "offset", offset, ()),
            **options,
        )
        return out.reshape(q.shape)

    def update(
        self,
        q: Float[AnyArray, "count heads size"],
        k: Float[AnyArray, "count kv_heads size"],
        v: Float[AnyArray, "count kv_heads size"],
        *,
        valid: Integer[AnyArray, ""] | AnyInt | None = None,
        scale: AnyNumber | None = None,
        causal: bool = True,
        window: AnyInt | None = None,
        soft_cap: AnyNumber | None = None,
        alibi_slopes: Float[AnyArray, " heads"] | None = None,
        bias: Float[AnyArray, "#heads count entries"] | None = None,
        mask: Bool[AnyArray, "#heads count entries"] | None = None,
        implementation: ops.Implementation = "auto",
    ) -> tuple[Float[Array, "count heads size"], "KVCache"]:
        """Attend from new tokens, and append them to the cache: one step of an attention layer, for a prompt as for one token.

        `append` and `attend` in one. For several tokens and a ring buffer it puts the old and the new keys into one temporary
        array of `window + count` entries.

        **Arguments:**

        - `q`, `k`, `v`: of the new tokens.
        - `valid`: how many of them count, by default all; see `append`. The results of the others mean nothing.
        - the others: as in `attend`.

        **Returns:** an array of the shape and dtype of `q`, and the cache.
        """
        who = "KVCache.update"
        q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
        self._check_rows(who, k, v)
        check(q.ndim == 3 and q.shape[0] == k.shape[0], who, "q, k and v of as many tokens", q=q, k=k)
        options: dict[str, Any] = {
            "scale": self._check_queries(who, q, scale),
            "causal": causal,
            "window": self._window(who, window),
            "soft_cap": soft_cap,
            "alibi_slopes": alibi_slopes,
            "implementation": implementation,
        }
        count, rows, kept = q.shape[0], self._stored(k, v), _valid(who, valid, q.shape[0])
        if self.window is None or count == 1:
            cache, offset = self._append(rows, kept), None if count == 1 else self.length
            return cache.attend(q, bias=bias, mask=mask, offset=offset, **options), cache
        if bias is not None or mask is not None:
            raise ValueError(f"{who}: expected no bias or mask for a ring buffer. Use a cache without a window.")
        filled = jnp.minimum(self.length, self.window)
        both = [
            None if x is None or new is None else ops.cache_append(_ring.unrolled(x, self.length, count), new, filled)
            for x, new in zip(self._arrays, rows, strict=True)
        ]
        # The very same rows, but XLA sees that the ring has been read before they are written into it. Else it copies the ring.
        rows = [None if x is None else jax.lax.dynamic_slice_in_dim(x, filled, count) for x in both]
        lengths = filled + (count if kept is None else kept)
        out = self._attend_several(q, both, lengths=lengths, offset=filled, **options)
        return out, self._append(rows, kept)

    def _attend_several(
        self, q: Array, arrays: Any, *, bias: AnyArray | None = None, mask: AnyArray | None = None, **options: Any
    ) -> Array:
        if self.k_scale is not None and bias is None and mask is None:
            return _int8_cache.attention(q, arrays, **options)
        k, v = self._floats(arrays, q.dtype)
        return ops.attention(q.astype(k.dtype), k, v, bias=bias, mask=mask, **options).astype(q.dtype)

    def _attend_one(self, q: Array, window: int | None, slopes: AnyArray | None, options: dict[str, Any]) -> Array:
        is_int8 = self.k_scale is not None
        x = q if is_int8 else q.astype(self.k.dtype)
        if self.window is None or (slopes is None and window == self.window):
            # Without positions the order of a ring's entries does not matter.
            if self.window is None:
                options, filled = {**options, "window": window, "alibi_slopes": slopes}, self.length
            else:
                filled = jnp.minimum(self.length, self.window)
            out = ops.decode_attention(x, self.k, self.v, filled, k_scale=self.k_scale, v_scale=self.v_scale, **options)
        else:
            age = _ring.ages(self.window, self.length)[None, None]
            mask = age < jnp.minimum(self.length, self.window if window is None else window)
            bias = None
            if slopes is not None:
                slopes = jnp.asarray(slopes)
                fits = slopes.shape == q.shape[:1] and jnp.issubdtype(slopes.dtype, jnp.floating)
                expected = f"alibi_slopes of shape ({q.shape[0]},) and a floating dtype"
                check(fits, "KVCache.attend", expected, alibi_slopes=slopes)
                bias = -slopes.astype(jnp.float32)[:, None, None] * age.astype(jnp.float32)
            k, v = self._floats(self._arrays, x.dtype)
            out = ops.attention(x[None], k, v, bias=bias, mask=mask, **options)[0]
        return out.astype(q.dtype)

    def _append(self, rows: Sequence[Value], valid: Array | None) -> "KVCache":
        def write(array: Array | None, new: Array | None) -> Array | None:
            if array is None or new is None:
                return None
            if self.window is None:
                return ops.cache_append(array, new, self.length)
            return _ring.append(array, new, self.length, valid)

        written = tuple(write(*pair) for pair in zip(self._arrays, rows, strict=True))
        return self._with(written, rows[0].shape[0], valid)

    def _with(self, arrays: Sequence[Array | None], count: Size, valid: Array | None) -> "KVCache":
        """The cache with these arrays, into which `count` tokens were written."""
        added = jnp.asarray(count, jnp.int32) if valid is None else valid
        return eqx.tree_at(
            lambda cache: (*cache._arrays, cache.length),
            self,
            (*arrays, self.length + added),
            is_leaf=lambda x: x is None,
        )

    @property
    def _arrays(self) -> tuple[Any, Any, Any, Any]:
        return self.k, self.v, self.k_scale, self.v_scale

    def _stored(self, k: Array, v: Array) -> tuple[Array, Array, Array | None, Array | None]:
        """Rows as the cache's arrays have them."""
        if self.k_scale is None:
            return k.astype(self.k.dtype), v.astype(self.v.dtype), None, None
        (k, k_scale), (v, v_scale) = _int8_cache.quantized(k), _int8_cache.quantized(v)
        return k, v, k_scale, v_scale

    def _floats(self, arrays: Any, dtype: DType) -> tuple[Array, Array]:
        """Keys and values that attention takes: those of floating dtype as they are."""
        k, v, k_scale, v_scale = arrays
        if k_scale is None:
            return k, v
        return _int8_cache.dequantized(k, k_scale).astype(dtype), _int8_cache.dequantized(v, v_scale).astype(dtype)

    def _check_rows(self, who: str, k: Array, v: Array) -> None:
        row = self.k.shape[1:]
        check(
            k.ndim == 3 and k.shape[1:] == row and v.shape == k.shape,
            who,
            f"k and v of shape (count, {row[0]}, {row[1]})",
            k=k,
            v=v,
        )
        check_floats(who, k=k, v=v)
        entries = self.k.shape[0]
        check(self.window is not None or k.shape[0] <= entries, who, f"not more tokens than the {entries} entries", k=k)

    def _check_queries(self, who: str, q: Array, scale: AnyNumber | None) -> float:
        kv_heads, size = self.k.shape[1:]
        check(
            q.ndim in (2, 3) and q.shape[-1] == size and q.shape[-2] % kv_heads == 0,
            who,
            f"q of shape (heads, {size}) or (queries, heads, {size}), heads a multiple of {kv_heads}",
            q=q,
        )
        check_floats(who, q=q)
        return scale_of(who, scale, size)

    def _window(self, who: str, window: AnyInt | None) -> int | None:
        if window is None:
            return self.window
        window = integer(who, "window to be a positive integer or None", window, least=1)
        if self.window is not None and window > self.window:
            raise ValueError(
                f"{who}: expected a window of at most {self.window}, which is what the ring buffer has; got {window}."
            )
        return window


def _valid(who: str, valid: Any, count: Size) -> Array | None:
    """The number of tokens that count, of `count`; `None` for all."""
    if valid is None:
        return None
    if not hasattr(valid, "shape"):
        valid = integer(who, f"valid from 0 to {count}", valid, least=0)
        check(jax.export.is_symbolic_dim(count) or valid <= count, who, f"valid from 0 to {count}", valid=valid)
    return integers(who, "valid", valid, ())
