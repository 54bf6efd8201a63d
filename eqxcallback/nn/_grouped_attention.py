"""Self-attention and cross-attention with grouped queries, as language models have it."""

import math
import sys
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer, PRNGKeyArray

from .. import ops
from ..core import AnyArray, AnyInt, AnyNumber, Size, check, check_arrays, check_flags, integer, number, soft_cap_of
from ._arrays import others_of
from ._cache import KVCache
from ._linear import Linear


class GroupedQueryAttention(eqx.Module):
    r"""$\mathrm{softmax}(s\, q k^T)\, v$ for each head, between four linear layers, where several query heads share the keys and
    values of one head.

    No array of queries times keys is ever made, in neither direction. A batch goes through `jax.vmap`.

    !!! example

        ```python
        attention = GroupedQueryAttention(8, 512, num_kv_heads=2, rope_theta=10_000.0, key=key)
        out = attention(x)

        cache = attention.init_cache(4096)
        out, cache = attention(prompt, cache=cache)
        out, cache = attention(token, cache=cache)  # of shape (1, 512)
        ```

    ??? cite

        [GQA](https://arxiv.org/abs/2305.13245), [ALiBi](https://arxiv.org/abs/2108.12409),
        [RoFormer](https://arxiv.org/abs/2104.09864)
    """

    query_proj: Linear
    key_proj: Linear
    value_proj: Linear
    output_proj: Linear
    dropout: eqx.nn.Dropout
    num_heads: int = eqx.field(static=True)
    query_size: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    head_size: int = eqx.field(static=True)
    output_size: int = eqx.field(static=True)
    use_query_bias: bool = eqx.field(static=True)
    use_key_bias: bool = eqx.field(static=True)
    use_value_bias: bool = eqx.field(static=True)
    use_output_bias: bool = eqx.field(static=True)
    causal: bool = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    soft_cap: float | None = eqx.field(static=True)
    alibi: bool = eqx.field(static=True)
    rope_theta: float | None = eqx.field(static=True)
    implementation: ops.Implementation = eqx.field(static=True)

    def __init__(
        self,
        num_heads: AnyInt,
        query_size: AnyInt,
        *,
        num_kv_heads: AnyInt | None = None,
        head_size: AnyInt | None = None,
        output_size: AnyInt | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        causal: bool = True,
        window: AnyInt | None = None,
        soft_cap: AnyNumber | None = None,
        alibi: bool = False,
        rope_theta: AnyNumber | None = None,
        dropout_p: AnyNumber = 0.0,
        inference: bool = False,
        dtype: DTypeLike | None = None,
        implementation: ops.Implementation = "auto",
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `num_heads`: of the queries.
        - `query_size`: the number of channels of the input.
        - `num_kv_heads`: of keys and values, a divisor of `num_heads`, which is the default. Query head `h` uses key/value head
            `h // (num_heads // num_kv_heads)`.
        - `head_size`: the number of channels of a head, by default `query_size // num_heads`.
        - `output_size`: the number of channels of the output, by default `query_size`.
        - `use_query_bias`, `use_key_bias`, `use_value_bias`, `use_output_bias`: of the linear layers.
        - `causal`: whether a token sees no later ones.
        - `window`: how many tokens a token sees, itself included; if not `causal`, so many to either side. By default all.
        - `soft_cap`: $c$; logits become $c \\tanh(\\mathrm{logits} / c)$.
        - `alibi`: whether logits fall with the distance of the tokens, by a slope for each head, as in ALiBi.
        - `rope_theta`: the base of the wave lengths of a rotary embedding of queries and keys, as in
            [`eqxcallback.ops.rotary_embedding`][]; by default there is none.
        - `dropout_p`, `inference`: dropout of the attention's weights, as in `equinox.nn.MultiheadAttention`.
        - `dtype`: of the parameters; by default JAX's default float.
        - `implementation`: of the attention; `"reference"` is that of everything. See [`eqxcallback.Op.using`][].
        - `key`: for the initial values of the parameters.
        """
        who = "GroupedQueryAttention"
        num_heads = integer(who, "num_heads to be an integer of at least 1", num_heads, least=1)
        query_size = integer(who, "query_size to be an integer of at least 1", query_size, least=1)
        num_kv_heads = (
            num_heads if num_kv_heads is None else integer(who, "num_kv_heads to be an integer", num_kv_heads)
        )
        head_size = integer(
            who,
            "head_size to be an integer of at least 1",
            query_size // num_heads if head_size is None else head_size,
            least=1,
            remedy="By default it is query_size // num_heads.",
        )
        output_size = query_size if output_size is None else output_size
        output_size = integer(who, "output_size to be an integer of at least 0", output_size, least=0)
        check_flags(who, causal=causal, alibi=alibi)
        if num_kv_heads < 1 or num_heads % num_kv_heads != 0:
            raise ValueError(f"{who}: expected num_kv_heads to divide num_heads, {num_heads}; got {num_kv_heads}.")
        if rope_theta is not None:
            rope_theta = number(who, "rope_theta to be a positive number or None", rope_theta, least=sys.float_info.min)
            if head_size % 2 != 0:
                raise ValueError(f"{who}: expected an even head_size for a rotary embedding; got {head_size}.")
        if window is not None:
            window = integer(who, "a window of at least 1, or None", window, least=1)

        others = others_of(implementation)

        def linear(size_in: int, size_out: int, use_bias: bool, key: PRNGKeyArray) -> Linear:
            return Linear(size_in, size_out, use_bias, dtype, key=key, implementation=others)

        query_key, key_key, value_key, output_key = jr.split(key, 4)
        self.query_proj = linear(query_size, num_heads * head_size, use_query_bias, query_key)
        self.key_proj = linear(query_size, num_kv_heads * head_size, use_key_bias, key_key)
        self.value_proj = linear(query_size, num_kv_heads * head_size, use_value_bias, value_key)
        self.output_proj = linear(num_heads * head_size, output_size, use_output_bias, output_key)
        rate: Any = dropout_p
        self.dropout = eqx.nn.Dropout(rate, inference=inference)
        self.num_heads = num_heads
        self.query_size = query_size
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.output_size = output_size
        self.use_query_bias = use_query_bias
        self.use_key_bias = use_key_bias
        self.use_value_bias = use_value_bias
        self.use_output_bias = use_output_bias
        self.causal = causal
        self.window = window
        self.soft_cap = soft_cap_of(who, soft_cap)
        self.alibi = alibi
        self.rope_theta = rope_theta
        self.implementation = implementation

    def init_cache(self, max_length: Size, dtype: DTypeLike | None = None) -> KVCache:
        """An empty cache for this layer, a ring buffer if it has a window.

        **Arguments:**

        - `max_length`, `dtype`: as of [`eqxcallback.nn.KVCache`][]; the dtype is by default that of the parameters.
        """
        dtype = self.key_proj.weight.dtype if dtype is None else dtype
        return KVCache(max_length, self.num_kv_heads, self.head_size, dtype, window=self.window)

    @overload
    def __call__(
        self,
        x: AnyArray,
        kv: AnyArray | None = None,
        *,
        bias: AnyArray | None = None,
        mask: AnyArray | None = None,
        segment_ids: AnyArray | tuple[AnyArray, AnyArray] | None = None,
        length: AnyArray | AnyInt | None = None,
        cache: None = None,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> Array: ...

    @overload
    def __call__(
        self,
        x: AnyArray,
        kv: AnyArray | None = None,
        *,
        bias: AnyArray | None = None,
        mask: AnyArray | None = None,
        segment_ids: AnyArray | tuple[AnyArray, AnyArray] | None = None,
        length: AnyArray | AnyInt | None = None,
        cache: KVCache,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> tuple[Array, KVCache]: ...

    @jax.named_scope("eqxcallback.nn.GroupedQueryAttention")
    def __call__(
        self,
        x: Float[AnyArray, "queries query_size"],
        kv: Float[AnyArray, "keys query_size"] | None = None,
        *,
        bias: Float[AnyArray, "*heads queries keys"] | None = None,
        mask: Bool[AnyArray, "*heads queries keys"] | None = None,
        segment_ids: Integer[AnyArray, " queries"]
        | tuple[Integer[AnyArray, " queries"], Integer[AnyArray, " keys"]]
        | None = None,
        length: Integer[AnyArray, ""] | AnyInt | None = None,
        cache: KVCache | None = None,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> Array | tuple[Array, KVCache]:
        """**Arguments:**

        - `x`: of shape `(queries, query_size)`.
        - `kv`: what keys and values are made of, of shape `(keys, query_size)`; by default `x`. The last query has the position
            of the last key.
        - `bias`: added to the logits, of shape `(queries, keys)`, or `(1 or num_heads, queries, keys)`. With a cache, `keys` is
            the number of its entries.
        - `mask`: `False` where a query does not see a key, of the same shapes.
        - `segment_ids`: integers, for sequences that are packed into one: a query sees the keys of its segment. A pair if
            queries and keys have different ones.
        - `length`: how many keys there are, if the others are padding; with a cache, how many of `x` are not padding.
        - `cache`: of the tokens before `x`. Keys and values of `x` are appended, and `x` sees them all.
        - `key`, `inference`: for dropout, as in `equinox.nn.MultiheadAttention`.

        **Returns:** an array of shape `(queries, output_size)`; with a cache, a pair of it and the new cache. A query that sees
        no key has zeros in place of what its heads see.
        """
        who = "GroupedQueryAttention"
        source = x if kv is None else kv
        check_arrays(who, x=x, kv=source)
        shapes = f"x and kv of shape (sequence, {self.query_size})"
        check(
            x.ndim == source.ndim == 2 and x.shape[1] == source.shape[1] == self.query_size, who, shapes, x=x, kv=source
        )
        rate = self._dropout(key, inference)
        q = jax.vmap(self.query_proj)(x).reshape(x.shape[0], self.num_heads, self.head_size)
        k, v = (
            jax.vmap(layer)(source).reshape(source.shape[0], self.num_kv_heads, self.head_size)
            for layer in (self.key_proj, self.value_proj)
        )
        if self.rope_theta is not None:
            first = jnp.zeros((), jnp.int32) if cache is None else cache.length
            k = self._rotated(k, first, self.rope_theta)
            q = self._rotated(q, first + (k.shape[0] - q.shape[0]), self.rope_theta)
        options: dict[str, Any] = {
            "causal": self.causal,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "alibi_slopes": jnp.asarray(alibi_slopes(self.num_heads), jnp.float32) if self.alibi else None,
            "bias": _with_heads(who, "bias", bias),
            "mask": _with_heads(who, "mask", mask),
            "implementation": self.implementation,
        }
        if cache is None:
            out = ops.attention(
                q, k, v, segment_ids=segment_ids, lengths=length, dropout=rate, key=key if rate else None, **options
            )
        else:
            self._check_cache(who, cache, kv is not None, segment_ids is not None, rate)
            out, cache = cache.update(q, k, v, valid=length, **options)
        out = jax.vmap(self.output_proj)(out.reshape(x.shape[0], self.num_heads * self.head_size))
        return out if cache is None else (out, cache)

    def _rotated(self, heads: Array, first: Array, theta: float) -> Array:
        positions = first + jnp.arange(heads.shape[0], dtype=jnp.int32)
        dtype = jnp.float64 if heads.dtype == jnp.float64 else jnp.float32
        table = ops.rotary_table(positions, self.head_size, theta=theta, dtype=dtype)
        return ops.rotary_embedding(heads, *table, implementation=others_of(self.implementation))

    def _dropout(self, key: PRNGKeyArray | None, inference: bool | None) -> float:
        p = self.dropout.p
        if p == 0 or (self.dropout.inference if inference is None else inference):
            return 0.0
        if key is None:
            raise RuntimeError(
                "GroupedQueryAttention: expected a key, for dropout; got none. Pass `key=`, or `inference=True`."
            )
        return float(p)

    def _check_cache(self, who: str, cache: KVCache, has_kv: bool, has_segments: bool, rate: float) -> None:
        given = {"kv": has_kv, "segment_ids": has_segments, "dropout": rate > 0}
        if any(given.values()):
            names = ", ".join(name for name, is_given in given.items() if is_given)
            raise ValueError(
                f"{who}: expected neither kv, segment_ids nor dropout with a cache; got {names}. Dropout is off with "
                "`inference=True`."
            )
        if cache.window is not None and (self.window is None or self.window > cache.window):
            raise ValueError(
                f"{who}: expected a cache of all tokens that the layer sees, whose window is {self.window}; got a ring buffer of "
                f"{cache.window}. `init_cache` makes one that fits."
            )


def alibi_slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes: for a power of two, a geometric sequence that ends at 1/256. For other numbers, the sequence for the
    next lower power of two, followed by every other slope of the sequence for twice as many.
    """
    power = 2 ** math.floor(math.log2(heads))
    more = [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]
    return [2 ** (-8 * i / power) for i in range(1, power + 1)] + more


def _with_heads(who: str, name: str, x: AnyArray | None) -> AnyArray | None:
    if x is None:
        return None
    check_arrays(who, **{name: x})
    return x[None] if x.ndim == 2 else x
