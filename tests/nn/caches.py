"""Tokens, and steps of a cache, for tests of caches."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from .naive import normal


LENGTH, HEADS, KV_HEADS, SIZE = 9, 4, 2, 8
NAMES = {jnp.float32: "f32", jnp.bfloat16: "bf16", jnp.float16: "f16", jnp.int8: "s8"}
# For a result near 1: what rounding q, k, v and the result to the storage's dtype may change.
TOLERANCE = {jnp.float32: 3e-6, jnp.bfloat16: 2.0**-5, jnp.float16: 2.0**-8, jnp.int8: 0.04}
# With and without a ring.
CACHES = [(dtype, window) for dtype in (jnp.float32, jnp.bfloat16, jnp.int8) for window in (None, 300)]
ALL: Any = {"alibi_slopes": jnp.array([0.5, 0.25, 0.125, 0.0625]), "soft_cap": 2.0, "scale": 0.7}


def tokens(dtype=jnp.float32, count=LENGTH):
    shapes = ((count, HEADS, SIZE), (count, KV_HEADS, SIZE), (count, KV_HEADS, SIZE))
    return [jnp.asarray(normal(i, *shape, dtype=dtype)) for i, shape in enumerate(shapes)]


def step(cache, token):
    q, k, v = token
    cache = cache.append(k[None], v[None])
    return cache, cache.attend(q)


def close(got, want, dtype):
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0, atol=TOLERANCE[dtype])
