"""Caches of keys and values: token by token they give what attention over all tokens gives, and nothing copies them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import nn, ops

from . import naive
from .caches import ALL, CACHES, HEADS, KV_HEADS, LENGTH, NAMES, SIZE, TOLERANCE, close, step, tokens
from .naive import normal, quickly_compiled


# Compiled as a whole: that takes less time than each of their operations alone.
append = quickly_compiled(lambda cache, k, v, valid=None: cache.append(k, v, valid=valid))
attend = quickly_compiled(lambda cache, q: cache.attend(q))


def updating(**options):
    return quickly_compiled(lambda cache, q, k, v, **arrays: cache.update(q, k, v, **arrays, **options))


def in_parts(update, cache, counts, q, k, v):
    """`update` of so many tokens each time."""
    outs, start = [], 0
    for count in counts:
        part = slice(start, start + count)
        out, cache = update(cache, q[part], k[part], v[part])
        outs.append(out)
        start += count
    return jnp.concatenate(outs), cache


# Token by token.


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("form", ["eager", "jit", "scan"])
def test_token_by_token_is_causal_attention(dtype, form):
    of_queries = jnp.float32 if dtype == jnp.int8 else dtype
    q, k, v = tokens(of_queries)
    cache = nn.KVCache(16, KV_HEADS, SIZE, dtype)
    assert cache.k.dtype == cache.v.dtype == dtype
    if form == "scan":
        cache, got = jax.lax.scan(step, cache, (q, k, v))
    else:
        outs, f = [], jax.jit(step) if form == "jit" else step
        for token in list(zip(q, k, v, strict=True))[: LENGTH if form == "jit" else 2]:
            cache, out = f(cache, token)
            outs.append(out)
        got = np.stack(outs)
    assert got.dtype == of_queries
    count = len(got)
    close(got, naive.attention(q, k, v, causal=True)[:count], dtype)
    assert cache.length == count
    assert cache.length.dtype == jnp.int32
    if dtype != jnp.int8:
        np.testing.assert_array_equal(cache.k[:count], k[:count])
        np.testing.assert_array_equal(cache.v[:count], v[:count])
    assert not np.any(np.asarray(cache.k[count:], np.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_prompts_and_tokens(dtype, window, options):
    """In parts of all sizes, of which some are longer than the window and some go around the ring's end."""
    q, k, v = tokens(count=14)
    alike = {"alibi" if name == "alibi_slopes" else name: value for name, value in options.items()}
    want = naive.attention(q, k, v, causal=True, window=window, **alike)
    update = updating(**options)
    for counts in ([14], [3, 1, 1, 3, 0, 3, 3]):
        cache = nn.KVCache(20, KV_HEADS, SIZE, dtype, window=window)
        assert cache.window == window
        assert cache.k.shape == (20 if window is None else window, KV_HEADS, SIZE)
        got, cache = in_parts(update, cache, counts, q, k, v)
        close(got, want, dtype)
        assert cache.length == 14


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
@pytest.mark.parametrize("ring", [None, 6])
def test_a_window_smaller_than_what_is_kept(dtype, ring):
    q, k, v = tokens(count=14)
    cache = nn.KVCache(20, KV_HEADS, SIZE, dtype, window=ring)
    got, _ = in_parts(updating(window=3), cache, [4, 1, 8, 1], q, k, v)
    close(got, naive.attention(q, k, v, causal=True, window=3), dtype)


def test_what_a_ring_holds():
    cache, ring = nn.KVCache(20, 1, 1), nn.KVCache(20, 1, 1, window=4)
    rows = jnp.arange(1.0, 14.0).reshape(-1, 1, 1)
    for start, stop in ((0, 1), (1, 4), (4, 6), (6, 6), (6, 13)):
        ring = append(ring, rows[start:stop], -rows[start:stop])
        cache = append(cache, rows[start:stop], -rows[start:stop])
        assert ring.length == cache.length == stop
        want = [max((t + 1 for t in range(stop) if t % 4 == slot), default=0) for slot in range(4)]
        np.testing.assert_array_equal(ring.k.ravel(), want)
        np.testing.assert_array_equal(ring.v.ravel(), [-x for x in want])


def test_a_window_that_is_never_full_needs_no_ring():
    cache = nn.KVCache(6, KV_HEADS, SIZE, window=8)
    assert cache.window is None
    assert cache.k.shape[0] == 6


def test_a_prompt_sees_both_ways():
    q, k, v = tokens()
    for cache in (nn.KVCache(16, KV_HEADS, SIZE), nn.KVCache(16, KV_HEADS, SIZE, window=16)):
        got, _ = updating(causal=False, window=3)(append(cache, k[:4], v[:4]), q[4:], k[4:], v[4:])
        close(got, naive.attention(q, k, v, window=3)[4:], jnp.float32)


def test_bias_and_mask():
    q, k, v = tokens()
    bias, mask = normal(7, HEADS, 3, 12), normal(8, 1, 3, 12) > -0.5
    cache = append(nn.KVCache(12, KV_HEADS, SIZE), k[:6], v[:6])
    got, cache = updating()(cache, q[6:], k[6:], v[6:], bias=bias, mask=mask)
    want = naive.attention(q[6:], k, v, causal=True, bias=bias[..., :9], mask=mask[..., :9])
    close(got, want, jnp.float32)
    one = quickly_compiled(lambda: cache.attend(q[8], bias=bias[:, 2:], mask=mask[:, 2:]))()
    close(one, want[2], jnp.float32)


def test_several_tokens_at_an_offset():
    q, k, v = tokens()
    cache = append(nn.KVCache(16, KV_HEADS, SIZE), k, v)
    want = naive.attention(q, k, v, causal=True)
    attend_at = quickly_compiled(lambda cache, q, offset: cache.attend(q, offset=offset))
    close(attend(cache, q[6:]), want[6:], jnp.float32)
    close(attend_at(cache, q[2:4], 2), want[2:4], jnp.float32)
    close(attend_at(cache, q[3], jnp.int32(3)), want[3], jnp.float32)


def test_an_empty_cache_gives_zeros():
    for dtype in NAMES:
        for options in ({}, {"window": 3}):
            cache = nn.KVCache(4, 1, 3, dtype, **options)
            np.testing.assert_array_equal(attend(cache, jnp.ones((2, 3))), np.zeros((2, 3)))
    np.testing.assert_array_equal(nn.KVCache(0, 1, 3, jnp.int8).attend(jnp.ones((2, 3))), np.zeros((2, 3)))


UPDATE = updating()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("valid", [0, 2, jnp.int32(2), 5])
def test_valid(valid, window):
    """The padding of a prompt is overwritten by what comes next, and attended by nobody."""
    q, k, v = tokens()
    n = int(valid)
    # Twice, so that the ring has old entries, which padding must leave alone.
    cache = append(nn.KVCache(16, KV_HEADS, SIZE, window=window), k[:4], v[:4])
    out, cache = UPDATE(cache, q[4:], k[4:], v[4:], valid=valid)
    assert cache.length == 4 + n
    assert cache.length.dtype == jnp.int32
    keys, values = (jnp.concatenate([x[: 4 + n], x[5:6]]) for x in (k, v))
    queries = jnp.concatenate([q[: 4 + n], q[:1]])
    want = naive.attention(queries, keys, values, causal=True, window=window)
    close(out[:n], want[4:-1], jnp.float32)
    cache = append(cache, k[5:6], v[5:6])
    close(attend(cache, q[0]), want[-1], jnp.float32)


def test_a_long_prompt_of_a_ring_ends_in_padding():
    q, k, v = tokens()
    for valid in range(LENGTH + 1):
        cache = append(nn.KVCache(16, KV_HEADS, SIZE, window=4), k, v, jnp.int32(valid))
        want = naive.attention(q[:1], k[:valid], v[:valid], window=4, offset=valid - 1)
        close(attend(cache, q[:1]), want, jnp.float32)


def test_too_many_entries_overwrite_the_last_ones():
    cache = nn.KVCache(3, 1, 1)
    for i in range(5):
        cache = append(cache, *2 * [jnp.full((1, 1, 1), float(i))])
    np.testing.assert_array_equal(cache.k.ravel(), [0, 1, 4])


# In 8 bits.


def test_int8_errs_by_half_a_scale():
    _, k, v = tokens()
    k = k * jnp.exp(jnp.arange(LENGTH, dtype=jnp.float32)).reshape(-1, 1, 1)  # of all sizes
    cache = append(nn.KVCache(16, KV_HEADS, SIZE, jnp.int8), k, v)
    assert cache.k_scale is not None
    assert cache.v_scale is not None
    np.testing.assert_allclose(cache.k_scale[:LENGTH], np.abs(k).max(-1) / 127, rtol=1e-6)
    for got, scale, want in ((cache.k, cache.k_scale, k), (cache.v, cache.v_scale, v)):
        scale = np.asarray(scale)[:LENGTH, :, None]
        assert np.all(np.abs(np.asarray(got, np.float32)[:LENGTH] * scale - want) <= 0.5001 * scale)
    nbytes = sum(x.nbytes for x in (cache.k, cache.k_scale))
    assert nbytes == 16 * KV_HEADS * (SIZE + 4)


@pytest.mark.parametrize("window", [None, 300])
def test_int8_in_blocks(window):
    """More entries than a block, some of them empty; the same values as of the dequantised cache, and derivatives."""
    k, v = (jnp.asarray(normal(i, 310, KV_HEADS, SIZE)) for i in (1, 2))
    q = jnp.asarray(normal(3, HEADS, SIZE))
    empty = nn.KVCache(320, KV_HEADS, SIZE, jnp.int8, window=window)
    for count in (1, 127, 128, 129, 290, 310):
        cache = append(empty, k, v, jnp.int32(count))
        keys, values = (
            np.asarray(x, np.float32) * np.asarray(scale)[..., None]
            for x, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale))
        )
        which: Any = {"length": count if window is None else min(count, window), "offset": 0}
        want = naive.attention(q[None], keys, values, **which)[0]
        np.testing.assert_allclose(attend(cache, q), want, rtol=1e-5, atol=2e-6)

    def dense(q):
        return naive.attention(q[None], keys, values, **which)[0]

    gradients = (quickly_compiled(jax.grad(lambda q, f=f: jnp.sum(jnp.sin(f(q)))))(q) for f in (cache.attend, dense))
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-6)


def test_int8_of_zeros_and_of_no_numbers():
    rows = jnp.stack([jnp.zeros((1, 4)), jnp.ones((1, 4))])
    cache, q = append(nn.KVCache(4, 1, 4, jnp.int8), rows, rows), jnp.zeros((1, 4))
    close(attend(cache, q), np.full((1, 4), 0.5), jnp.float32)
    assert np.all(np.isnan(attend(append(cache, rows, rows * jnp.nan), q)))


# Dtypes.


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_queries_of_another_dtype(stored, dtype):
    q, k, v = tokens(dtype)
    cache = append(nn.KVCache(16, KV_HEADS, SIZE, stored), k, v)
    several, one = quickly_compiled(lambda cache, q: (cache.attend(q), cache.attend(q[8])))(cache, q)
    assert several.dtype == one.dtype == dtype
    want, tolerance = naive.attention(q, k, v, causal=True), max(TOLERANCE[stored], TOLERANCE[dtype])
    np.testing.assert_allclose(several.astype(jnp.float32), want, rtol=0, atol=tolerance)
    np.testing.assert_allclose(one.astype(jnp.float32), want[8], rtol=0, atol=tolerance)


def test_what_is_appended_is_rounded():
    cache = nn.KVCache(4, 1, 2, jnp.bfloat16).append(jnp.full((1, 1, 2), 1 + 2.0**-9), jnp.ones((1, 1, 2)))
    assert cache.k.dtype == jnp.bfloat16
    np.testing.assert_array_equal(cache.k[0].astype(jnp.float32), np.ones((1, 2)))


def test_in_f64(x64):
    q, k, v = (x.astype(jnp.float64) for x in tokens())
    for dtype, tolerance in ((None, 1e-12), (jnp.int8, 0.04)):
        cache = append(nn.KVCache(16, KV_HEADS, SIZE, dtype), k, v)
        assert cache.k.dtype == (jnp.float64 if dtype is None else dtype)
        got = attend(cache, q[8])
        assert got.dtype == jnp.float64
        want = ops.attention(q, k, v, causal=True)[8]
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


# Batches.


@pytest.mark.parametrize(("dtype", "window"), CACHES)
def test_caches_of_a_batch(dtype, window):
    """Sequences of different lengths: one call of each kernel for all of them."""
    window = None if window is None else 5
    q, k, v = (jnp.stack([x, x[::-1]]) for x in tokens())
    counts = jnp.array([3, 7])
    caches = jax.vmap(lambda _: nn.KVCache(16, KV_HEADS, SIZE, dtype, window=window))(jnp.arange(2))
    caches = quickly_compiled(jax.vmap(lambda cache, k, v, n: cache.append(k, v, valid=n)))(caches, k, v, counts)
    f = jax.vmap(lambda cache, *token: cache.update(*token))
    got, caches = quickly_compiled(f)(caches, q[:, :1], k[:, :1], v[:, :1])
    for i, n in enumerate([3, 7]):
        keys, values = (jnp.concatenate([x[i, :n], x[i, :1]]) for x in (k, v))
        want = naive.attention(q[i, :1], keys, values, causal=True, window=window)
        close(got[i], want, dtype)
    np.testing.assert_array_equal(caches.length, [4, 8])
    text = jax.jit(f).lower(caches, q[:, :1], k[:, :1], v[:, :1]).as_text()
    assert text.count("custom_call @eqxcallback_cache_append(") == (2 if dtype != jnp.int8 else 4)
    assert text.count("custom_call @eqxcallback_decode_attention(") == 1
    assert "while" not in text


# Mistakes.


def test_wrong_arguments():
    cache = nn.KVCache(4, KV_HEADS, SIZE)
    row = jnp.zeros((1, KV_HEADS, SIZE))
    with pytest.raises(ValueError, match=r"KVCache: expected a floating dtype or int8; got int32"):
        nn.KVCache(4, 1, 1, jnp.int32)
    with pytest.raises(ValueError, match=r"KVCache: expected a window of at least 1, or None; got 0"):
        nn.KVCache(4, 1, 1, window=0)
    no: Any = "4"
    with pytest.raises(ValueError, match=r"KVCache: expected max_length to be an integer of at least 0; got -1\."):
        nn.KVCache(-1, 1, 4)
    with pytest.raises(ValueError, match=r"KVCache: expected kv_heads to be an integer of at least 1; got 0\."):
        nn.KVCache(4, 0, 4)
    with pytest.raises(ValueError, match=r"KVCache: expected size to be an integer of at least 0; got '4'\."):
        nn.KVCache(4, 1, no)
    with pytest.raises(ValueError, match=r"KVCache: expected a window of at least 1, or None; got '4'\."):
        nn.KVCache(4, 1, 4, window=no)
    for window in (0, no, True):
        with pytest.raises(ValueError, match=rf"KVCache.attend: expected window to be a positive .*; got {window!r}\."):
            cache.attend(jnp.zeros((2, SIZE)), window=window)
    shapes = r"KVCache.append: expected k and v of shape \(count, 2, 8\); got k: float32\[1,2,7\], v: float32\[1,2,8\]"
    with pytest.raises(ValueError, match=shapes):
        cache.append(row[..., :7], row)
    with pytest.raises(ValueError, match=r"KVCache.append: expected k and v of shape .*; got k: float32\[2,8\]"):
        cache.append(row[0], row[0])
    with pytest.raises(
        ValueError, match=r"KVCache.append: expected not more tokens than the 4 entries; got k: float32\[5"
    ):
        cache.append(jnp.zeros((5, KV_HEADS, SIZE)), jnp.zeros((5, KV_HEADS, SIZE)))
    with pytest.raises(ValueError, match=r"KVCache.append: expected k, v of one floating dtype"):
        cache.append(row.astype(jnp.int32), row.astype(jnp.int32))
    with pytest.raises(ValueError, match=r"KVCache.append_rotary: expected qkv of shape \(count, heads \+ 4, size\)"):
        cache.append_rotary(jnp.zeros((1, 3, SIZE)), *2 * [jnp.zeros((1, SIZE // 2))])
    with pytest.raises(ValueError, match=r"KVCache.append_rotary: expected not more tokens than the 4 entries"):
        cache.append_rotary(jnp.zeros((5, 6, SIZE)), *2 * [jnp.zeros((5, SIZE // 2))])
    q = r"KVCache.attend: expected q of shape \(heads, 8\) or \(queries, heads, 8\), heads a multiple of 2; got q: float32"
    for shape in ((3, 8), (4, 7), (8,), (1, 1, 2, 8)):
        with pytest.raises(ValueError, match=q):
            cache.attend(jnp.zeros(shape))
    with pytest.raises(
        ValueError, match=r"KVCache.update: expected q, k and v of as many tokens; got q: float32\[2,4,8\]"
    ):
        cache.update(jnp.zeros((2, 4, SIZE)), row, row)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("window", [None, 3])
def test_rotation_and_append_are_one(dtype, window):
    """As apart: to the bit, whatever the cache is."""
    q, k, v = tokens(jnp.float32 if dtype == jnp.int8 else dtype, 4)
    table = ops.rotary_table(jnp.arange(4) + 2, SIZE)
    cache = nn.KVCache(9, KV_HEADS, SIZE, dtype, window=window).append(k[:2], v[:2])
    rotary = quickly_compiled(lambda cache, qkv, cos, sin: cache.append_rotary(qkv, cos, sin, valid=3))
    got_q, got = rotary(cache, jnp.concatenate([q, k, v], axis=1), *table)
    want = append(cache, ops.rotary_embedding(k, *table), v, 3)
    np.testing.assert_array_equal(got_q, ops.rotary_embedding(q, *table))
    assert got.length == 5
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_sizes_of_numpy_and_of_shapes_that_are_exported():
    size: Any = np.int64(3)
    ring = nn.KVCache(size, size, size, window=size)
    assert (type(ring.window), ring.k.shape) == (int, (3, 3, 3))
    q, row = normal(0, 3, 3), jnp.asarray(normal(1, 1, 3, 3))
    ring = ring.append(row, row)
    np.testing.assert_array_equal(ring.attend(q, window=size), ring.attend(q, window=3))
    (length,) = jax.export.symbolic_shape("length", constraints=["length >= 8"])
    x = jax.ShapeDtypeStruct((length,), jnp.float32)
    made = jax.export.export(jax.jit(lambda x: nn.KVCache(x.shape[0], 1, 4, window=3).k))(x)
    assert made.out_avals[0].shape == (3, 1, 4)


def test_what_a_ring_cannot_do():
    ring = nn.KVCache(4, KV_HEADS, SIZE, window=3)
    q, k, v = (x[:2] for x in tokens())
    with pytest.raises(
        ValueError, match=r"KVCache.attend: expected one token, .* for a ring buffer; .*: call `update`"
    ):
        ring.attend(q)
    with pytest.raises(ValueError, match=r"KVCache.update: expected no bias or mask for a ring buffer"):
        ring.update(q, k, v, mask=jnp.ones((1, 2, 3), bool))
    with pytest.raises(ValueError, match=r"KVCache.attend: expected a window of at most 3, .*; got 4"):
        ring.attend(q[0], window=4)
