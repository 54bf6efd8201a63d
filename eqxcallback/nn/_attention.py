"""Multi-head attention, as Equinox has it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Num, PRNGKeyArray

from .. import ops
from ..core import AnyArray, AnyNumber, warn
from ._adopt import adopt
from ._arrays import are_floats, others_of
from ._linear import Linear


ProcessHeads = Callable[[Array, Array, Array], tuple[Array, Array, Array]]


class MultiheadAttention(eqx.nn.MultiheadAttention):
    r"""`equinox.nn.MultiheadAttention`, without an array of queries times keys.

    The same constructor, fields, parameters and call. What differs: a query whose mask is `False` everywhere gives zeros to
    the last linear layer, where Equinox gives the mean of all values; and everything between the linear layers is computed in
    f32 and rounded once, where Equinox rounds logits and weights to the inputs' dtype.

    ??? cite

        [Attention is All You Need](https://arxiv.org/abs/1706.03762),
        [FlashAttention](https://arxiv.org/abs/2205.14135)
    """

    implementation: ops.Implementation = eqx.field(static=True, default="auto")

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: AnyNumber = 0.0,
        inference: bool = False,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        implementation: ops.Implementation = "auto",
    ):
        """**Arguments:**

        - `num_heads`: the number of heads.
        - `query_size`, `key_size`, `value_size`, `output_size`: the numbers of channels of the inputs and the output, by default
            all `query_size`.
        - `qk_size`: the number of channels of a head's queries and keys, by default `query_size // num_heads`.
        - `vo_size`: the same of its values. If they differ, the smaller ones are padded with zeros.
        - `use_query_bias`, `use_key_bias`, `use_value_bias`, `use_output_bias`: of the linear layers.
        - `dropout_p`, `inference`: dropout of the attention's weights.
        - `dtype`: of the parameters; by default JAX's default float.
        - `key`: for the initial values of the parameters.
        - `implementation`: of the attention; `"reference"` is that of the linear layers too. See [`eqxcallback.Op.using`][].
        """
        equinox: Any = super()
        equinox.__init__(
            num_heads,
            query_size,
            key_size,
            value_size,
            output_size,
            qk_size,
            vo_size,
            use_query_bias,
            use_key_bias,
            use_value_bias,
            use_output_bias,
            dropout_p,
            inference,
            dtype,
            key=key,
        )
        others = others_of(implementation)
        self.query_proj = adopt(Linear, self.query_proj, implementation=others)
        self.key_proj = adopt(Linear, self.key_proj, implementation=others)
        self.value_proj = adopt(Linear, self.value_proj, implementation=others)
        self.output_proj = adopt(Linear, self.output_proj, implementation=others)
        self.implementation = implementation

    @jax.named_scope("eqxcallback.nn.MultiheadAttention")
    def __call__(
        self,
        query: Num[AnyArray, "queries query_size"],
        key_: Num[AnyArray, "keys key_size"],
        value: Num[AnyArray, "keys value_size"],
        mask: Bool[AnyArray, "*num_heads queries keys"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: ProcessHeads | None = None,
        causal: bool = False,
    ) -> Num[Array, "queries output_size"]:
        """**Arguments:**

        - `query`, `key_`, `value`: of shapes `(queries, query_size)`, `(keys, key_size)` and `(keys, value_size)`.
        - `mask`: `False` where a query does not see a key, of shape `(queries, keys)` or `(num_heads, queries, keys)`.
        - `key`: for dropout, which drops the weights that Equinox drops for the same key.
        - `inference`: whether there is no dropout, by default what the layer says.
        - `deterministic`: the old name of `inference`.
        - `process_heads`: a function from the heads of queries, keys and values, each of shape `(sequence, num_heads, size)`, to
            others of the same shapes.
        - `causal`: whether query `i` sees only the keys up to `i + keys - queries`. It costs no mask.

        **Returns:** an array of shape `(queries, output_size)`.
        """
        if deterministic is not None:
            inference = deterministic
            warn(
                "MultiheadAttention()(deterministic=...) is deprecated in favour of MultiheadAttention()(inference=...)"
            )
        rate = self._dropout_rate(key, inference)
        heads = None if rate is None or not are_floats(query, key_, value) else self._heads(query, key_, value)
        if rate is None or heads is None or not are_floats(*heads):
            if causal:
                seen = jnp.tri(query.shape[0], key_.shape[0], key_.shape[0] - query.shape[0], dtype=bool)
                mask = seen if mask is None else mask & jnp.broadcast_to(seen, mask.shape)
            equinox: Any = super()
            return equinox.__call__(query, key_, value, mask, key=key, inference=inference, process_heads=process_heads)
        queries, keys = query.shape[0], key_.shape[0]
        if process_heads is not None:
            shapes = [x.shape for x in heads]
            heads = tuple(process_heads(*heads))
            if [x.shape for x in heads] != shapes:
                raise ValueError("process_heads must not change the shape of the heads.")
        if mask is not None:
            mask = self._per_head(mask, queries, keys)
        q, k, v = (x.astype(jnp.result_type(*heads)) for x in heads)
        out = ops.attention(
            q,
            k,
            v,
            causal=causal,
            mask=mask,
            dropout=rate,
            key=key if rate else None,
            implementation=self.implementation,
        )
        return jax.vmap(self.output_proj)(out.reshape(queries, self.num_heads * v.shape[-1]))

    def _heads(self, query: AnyArray, key_: AnyArray, value: AnyArray) -> tuple[Array, Array, Array]:
        if value.shape[0] != key_.shape[0]:
            raise ValueError("key and value must both be sequences of equal length.")
        return (
            self._project(self.query_proj, query),
            self._project(self.key_proj, key_),
            self._project(self.value_proj, value),
        )

    def _project(self, proj: Any, x: AnyArray) -> Array:
        """Equinox's, for empty sequences too."""
        queries, _ = x.shape
        out = jax.vmap(proj)(x)
        return out.reshape(queries, self.num_heads, out.shape[-1] // self.num_heads)

    def _dropout_rate(self, key: PRNGKeyArray | None, inference: bool | None) -> float | None:
        """`None` if it is not known now, but an array, or if something else stands for the dropout."""
        if type(self.dropout) is not eqx.nn.Dropout:
            return None
        p = self.dropout.p
        is_known = isinstance(p, int | float | np.number)
        if (self.dropout.inference if inference is None else inference) or (is_known and p == 0):
            return 0.0
        if key is None:
            raise RuntimeError("Dropout requires a key when running in non-deterministic mode.")
        return float(p) if is_known and p < 1 else None

    def _per_head(self, mask: AnyArray, queries: int, keys: int) -> AnyArray:
        """A mask as attention takes it."""
        shapes = ((queries, keys), (self.num_heads, queries, keys))
        if mask.shape not in shapes:
            raise ValueError(
                f"mask must have shape (query_seq_length, kv_seq_length)=({queries}, {keys}), or that for each of "
                f"{self.num_heads} heads. Got {mask.shape}."
            )
        return mask.astype(bool).reshape(-1, queries, keys)
