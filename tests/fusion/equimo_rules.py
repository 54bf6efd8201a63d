"""Rules for Equimo, as a package of a user would have them. The tests also install this file as one."""

from typing import Any

import equimo.layers.attention as theirs
import jax
import jax.numpy as jnp
import jax.random as jr

import eqxcallback as eqxc


Theirs: Any = theirs.Attention  # its decorator hides its fields from type checkers


class Attention(Theirs):
    """Equimo's, without an array of queries times keys. A query that sees no key gives zeros, and not the mean of all values."""

    def __call__(self, x, key, inference=None, mask=None, rope_sincos=None):
        if self.attn_drop.p > 0 and not (self.attn_drop.inference if inference is None else inference):
            return super().__call__(x, key, inference, mask, rope_sincos)  # which weights it drops is its own
        heads = jax.vmap(self.qkv)(x).reshape(len(x), 3, self.num_heads, self.head_dim)
        q, k, v = heads[:, 0], heads[:, 1], heads[:, 2]
        q, k = jax.vmap(jax.vmap(self.q_norm))(q), jax.vmap(jax.vmap(self.k_norm))(k)
        if rope_sincos is not None:
            turned = theirs.rope_apply_qk_last_hw(q.swapaxes(0, 1), k.swapaxes(0, 1), *rope_sincos)
            q, k = (y.swapaxes(0, 1) for y in turned)
        if mask is not None:
            mask = jnp.broadcast_to(mask != 0, jnp.broadcast_shapes(mask.shape, (len(x), len(x))))
        out = eqxc.ops.attention(q, k, v, mask=mask)
        out = jax.vmap(self.proj)(out.reshape(len(x), self.dim))
        return self.proj_drop(out, inference=inference, key=jr.split(key)[1])


RULES = [eqxc.FuseRule(replaces=Theirs, by=Attention)]
