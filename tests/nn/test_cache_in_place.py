"""No program copies a cache that it may overwrite."""

import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import nn

from . import naive
from .caches import ALL, CACHES, KV_HEADS, NAMES, SIZE, step, tokens


def arrays(cache):
    return [x for x in (cache.k, cache.v, cache.k_scale, cache.v_scale) if x is not None]


def types(cache):
    names = {jnp.dtype(dtype): name for dtype, name in NAMES.items()}
    return {f"{names[x.dtype]}[{','.join(map(str, x.shape))}]" for x in arrays(cache)}


@pytest.mark.parametrize(("dtype", "window"), CACHES)
@pytest.mark.parametrize("options", [{}, ALL], ids=["", "all"])
def test_a_donated_cache_is_written_in_place(dtype, window, options):
    """The compiled program has no copy of it, and it stays where it is."""
    cache = nn.KVCache(512, KV_HEADS, SIZE, dtype, window=window)
    token = [x[:1] for x in tokens()]

    def one(cache, token):
        return cache.update(*token, **options)

    program = jax.jit(one, donate_argnums=0).lower(cache, token).compile()
    text = program.as_text() or ""
    for array in types(cache):
        assert naive.copies(text, array) == []
        assert naive.makers(text, array) <= {"parameter", "custom-call", "get-tuple-element"}
        assert "custom-call" in naive.makers(text, array)
    where = [x.unsafe_buffer_pointer() for x in arrays(cache)]
    for _ in range(3):
        _, cache = program(cache, token)
        assert [x.unsafe_buffer_pointer() for x in arrays(cache)] == where
    assert cache.length == 3


@pytest.mark.parametrize(("dtype", "window"), CACHES)
def test_a_cache_in_a_loop_is_written_in_place(dtype, window):
    cache = nn.KVCache(512, KV_HEADS, SIZE, dtype, window=window)
    program = jax.jit(lambda c, t: jax.lax.scan(step, c, t), donate_argnums=0).lower(cache, tokens()).compile()
    for array in types(cache):
        assert naive.copies(program.as_text() or "", array) == []
    where = [x.unsafe_buffer_pointer() for x in arrays(cache)]
    cache, _ = program(cache, tokens())
    assert [x.unsafe_buffer_pointer() for x in arrays(cache)] == where


@pytest.mark.parametrize(("dtype", "window"), CACHES)
def test_a_prompt_is_written_in_place(dtype, window):
    cache = nn.KVCache(512, KV_HEADS, SIZE, dtype, window=window)
    update = jax.jit(lambda cache, t: cache.update(*t), donate_argnums=0)
    program = update.lower(cache, tokens()).compile()
    for array in types(cache):
        assert naive.copies(program.as_text() or "", array) == []
    where = [x.unsafe_buffer_pointer() for x in arrays(cache)]
    _, cache = program(cache, tokens())
    assert [x.unsafe_buffer_pointer() for x in arrays(cache)] == where


@pytest.mark.parametrize("window", [None, 3000])
def test_several_tokens_do_not_dequantise_int8_as_a_whole(window):
    cache = nn.KVCache(3000, KV_HEADS, SIZE, jnp.int8, window=window)
    program = jax.jit(lambda cache, t: cache.update(*t), donate_argnums=0).lower(cache, tokens()).compile()
    assert not re.search(r"f32\[(1,)?30\d\d,2,8\]", program.as_text() or "")
    memory = program.memory_analysis()
    assert memory is not None
    copies = 0 if window is None else 2 * 3009 * KV_HEADS * (SIZE + 4)  # of a ring, as it is stored
    assert memory.temp_size_in_bytes < copies * 2 + 3000 * KV_HEADS * SIZE * 4


def test_int8_is_not_dequantised_as_a_whole():
    cache = nn.KVCache(512, KV_HEADS, SIZE, jnp.int8)
    program = jax.jit(step, donate_argnums=0).lower(cache, [x[0] for x in tokens()]).compile()
    assert "f32[512,2,8]" not in (program.as_text() or "")
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 512 * KV_HEADS * SIZE * 4


def test_donated_by_equinox():
    cache = nn.KVCache(64, KV_HEADS, SIZE, jnp.int8)
    where = [x.unsafe_buffer_pointer() for x in arrays(cache)]
    f = eqx.filter_jit(lambda cache, token: step(cache, token), donate="all")
    for _ in range(2):
        cache, _ = f(cache, [x[0] for x in tokens()])
        assert [x.unsafe_buffer_pointer() for x in arrays(cache)] == where


def test_a_cache_that_is_kept_survives():
    _, k, v = tokens()
    for make in (nn.KVCache, partial(nn.KVCache, window=3), partial(nn.KVCache, dtype=jnp.int8)):
        cache = make(4, KV_HEADS, SIZE)
        jax.jit(step)(cache, [x[0] for x in tokens()])
        cache.append(k[:2], v[:2])
        assert not any(np.any(x) for x in arrays(cache))
        assert cache.length == 0
