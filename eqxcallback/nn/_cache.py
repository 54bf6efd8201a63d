"""The keys and values of an attention layer, kept from token to token."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .. import ops


class KVCache(eqx.Module):
    """Keys and values of the tokens so far, which `append` writes in place.

    In place means: donate the cache to the jitted function that appends to it, or carry it through a loop, and use only what
    comes back. XLA copies a cache that anybody else still needs.

    **Attributes:**

    - `k`, `v`: of shape `(max_length, kv_heads, size)`.
    - `length`: how many entries are filled, int32 of shape `()`.
    """

    k: Float[Array, "max_length kv_heads size"]
    v: Float[Array, "max_length kv_heads size"]
    length: Int[Array, ""]

    def __init__(self, max_length: int, kv_heads: int, size: int, dtype: Any = None):
        """**Arguments:**

        - `max_length`, `kv_heads`, `size`: the shape of keys and values.
        - `dtype`: of both; by default JAX's default float.
        """
        dtype = jnp.result_type(float) if dtype is None else dtype
        self.k = jnp.zeros((max_length, kv_heads, size), dtype)
        self.v = jnp.zeros((max_length, kv_heads, size), dtype)
        self.length = jnp.zeros((), jnp.int32)

    def append(
        self,
        k: Float[Array, "count kv_heads size"],
        v: Float[Array, "count kv_heads size"],
        *,
        valid: Int[Array, ""] | int | None = None,
    ) -> "KVCache":
        """The cache with more entries. There must be room for them: the last entries are overwritten otherwise.

        **Arguments:**

        - `k`, `v`: of shape `(count, kv_heads, size)`.
        - `valid`: how many of them count, by default all. The others are padding: the next `append` overwrites them.
        """
        added = jnp.asarray(k.shape[0] if valid is None else valid, jnp.int32)
        new = (
            ops.cache_append(self.k, k.astype(self.k.dtype), self.length),
            ops.cache_append(self.v, v.astype(self.v.dtype), self.length),
            self.length + added,
        )
        return eqx.tree_at(lambda cache: (cache.k, cache.v, cache.length), self, new)

    def attend(self, q: Float[Array, "heads size"], *, scale: float | None = None) -> Float[Array, "heads size"]:
        """The attention of one token over the entries so far, its own included if it has been appended.

        **Arguments:**

        - `q`: of shape `(heads, size)` and the cache's dtype, `heads` a multiple of `kv_heads`.
        - `scale`: of the logits, by default $1 / \\sqrt{\\mathrm{size}}$.
        """
        return ops.decode_attention(q, self.k, self.v, self.length, scale=scale)
