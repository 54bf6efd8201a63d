"""Several tokens over a cache of 8 bits, of which some entries at a time are dequantised."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import nn

from . import naive
from .caches import ALL, HEADS, KV_HEADS, SIZE, close
from .naive import normal, quickly_compiled


append = quickly_compiled(lambda cache, k, v, valid: cache.append(k, v, valid=valid))
update = quickly_compiled(lambda cache, q, k, v: cache.update(q, k, v))


@pytest.mark.parametrize("options", [{}, {**ALL, "window": 600}, {"causal": False}], ids=["causal", "all", "both ways"])
def test_several_tokens_of_int8_in_parts(options):
    """Two parts and a rest, of which a query may see one, some or none, give the same as the dequantised cache."""
    k, v = (jnp.asarray(normal(i, 1200, KV_HEADS, SIZE)) for i in (1, 2))
    q = jnp.asarray(normal(3, 5, HEADS, SIZE))
    several = quickly_compiled(lambda cache, q, offset: cache.attend(q, offset=offset, **options))
    alike: Any = {"causal": True} | {("alibi" if n == "alibi_slopes" else n): x for n, x in options.items()}
    empty = nn.KVCache(1200, KV_HEADS, SIZE, jnp.int8)
    for count, offset in ((3, 0), (512, 507), (700, 600), (1200, 1195), (1200, -2)):
        cache = append(empty, k, v, jnp.int32(count))
        keys, values = (
            np.asarray(x, np.float32) * np.asarray(scale)[..., None]
            for x, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
        )
        want = naive.attention(q, keys, values, length=count, offset=offset, **alike)
        np.testing.assert_allclose(several(cache, q, offset), want, rtol=1e-5, atol=2e-6)

    def dense(q):
        return naive.attention(q, keys, values, length=count, offset=offset, **alike)

    ours = quickly_compiled(jax.grad(lambda q: jnp.sum(jnp.sin(cache.attend(q, offset=offset, **options)))))(q)
    theirs = quickly_compiled(jax.grad(lambda q: jnp.sum(jnp.sin(dense(q)))))(q)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("offset", [7, np.int64(7), np.uint32(7), jnp.uint8(7), -(2**31), -(2**40)])
def test_offsets_of_any_integers(offset):
    k, v, q = (jnp.asarray(normal(i, 1200, KV_HEADS, SIZE)) for i in (1, 2, 3))
    cache = append(nn.KVCache(1200, KV_HEADS, SIZE, jnp.int8), k, v, jnp.int32(1200))
    q = jnp.repeat(q[:3], HEADS // KV_HEADS, axis=1)
    out = cache.attend(q, offset=offset)
    if int(offset) == 7:
        first = append(nn.KVCache(1200, KV_HEADS, SIZE, jnp.int8), k[:10], v[:10], jnp.int32(10))
        np.testing.assert_array_equal(out, first.attend(q, offset=7))
    else:  # before all keys: no query sees one
        np.testing.assert_array_equal(out, 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_ring_of_int8_takes_several_tokens_in_parts(dtype):
    q, k, v = (jnp.asarray(normal(i, 1400, heads, SIZE)) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    cache, outs = nn.KVCache(2000, KV_HEADS, SIZE, jnp.int8, window=600), []
    for start, end in ((0, 700), (700, 707), (707, 1400)):
        out, cache = update(cache, q[start:end].astype(dtype), k[start:end], v[start:end])
        assert out.dtype == dtype
        outs.append(out)
    close(jnp.concatenate(outs), naive.attention(q, k, v, causal=True, window=600), jnp.int8)
    assert cache.length == 1400
