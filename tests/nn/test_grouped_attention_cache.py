"""Grouped-query attention with a cache gives what it gives without."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from . import naive
from .grouped import (
    COMBINED,
    HEAD,
    KV_HEADS,
    LENGTH,
    SIZE,
    close,
    inputs,
    make,
    naively,
    text,
)
from .naive import normal, quickly_compiled


@pytest.mark.parametrize("dtype", [None, jnp.int8], ids=str)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": 4}, COMBINED], ids=text)
def test_prompts_and_tokens_are_the_whole(options, dtype):
    layer, x = make(**options), inputs()
    want = naively(layer, x)
    step = quickly_compiled(lambda cache, x: layer(x, cache=cache))
    for counts in ([9, 1, 1, 2], [1, 9, 1, 2]):
        cache, outs = layer.init_cache(16, dtype), []
        assert cache.k.shape == (16 if layer.window is None else 4, KV_HEADS, HEAD)
        assert cache.k.dtype == (jnp.float32 if dtype is None else dtype)
        for part in np.split(x, np.cumsum(counts)[:-1]):
            out, cache = step(cache, jnp.asarray(part))
            outs.append(out)
        close(jnp.concatenate(outs), want, 1e-5 if dtype is None else 0.05)
        assert cache.length == LENGTH


def test_tokens_in_a_scan():
    layer, x = make(**COMBINED), inputs()

    def step(cache, x):
        out, cache = layer(x[None], cache=cache)
        return cache, out[0]

    _, got = quickly_compiled(lambda x: jax.lax.scan(step, layer.init_cache(16), x))(x)
    close(got, naively(layer, x))


@pytest.mark.parametrize("options", [{}, COMBINED], ids=text)
@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_prompts_of_a_batch(options, implementation):
    """The prompts have different lengths: padding is not remembered, whatever it is."""
    layer, x = make(**options, implementation=implementation), inputs(2)
    padded = x.at[0, 6:].set(jnp.nan)
    caches = jax.vmap(lambda _: layer.init_cache(16))(jnp.arange(2))
    step = quickly_compiled(jax.vmap(lambda cache, x, n: layer(x, cache=cache, length=n)))
    one = quickly_compiled(jax.vmap(lambda cache, x: layer(x, cache=cache)))
    out, caches = step(caches, padded[:, :10], jnp.array([6, 10]))
    last, caches = one(caches, x[:, 10:11])
    for i, n in enumerate([6, 10]):
        want = naively(layer, jnp.concatenate([x[i, :n], x[i, 10:11]]))
        close(out[i, :n], want[:n])
        close(last[i], want[n:])
    np.testing.assert_array_equal(caches.length, [7, 11])


def test_bias_and_mask_with_a_cache():
    layer, x = make(), inputs()
    bias, mask = jnp.asarray(normal(1, LENGTH, 16)), jnp.asarray(normal(2, LENGTH, 16) > -1)
    want = naively(layer, x, bias=bias[:, :LENGTH], mask=np.asarray(mask[:, :LENGTH]))
    cache = layer.init_cache(16)
    step = quickly_compiled(lambda cache, x, bias, mask: layer(x, cache=cache, bias=bias, mask=mask))
    for part in (slice(0, 12), slice(12, 13)):
        out, cache = step(cache, x[part], bias[part], mask[part])
        close(out, want[part])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("options", [{"rope_theta": 100.0}, {"window": 300}, {"alibi": True}], ids=text)
def test_a_step_copies_no_cache(dtype, options):
    layer = make(output_size=SIZE, **options)
    cache = layer.init_cache(512, dtype)
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)[:2]]
    array = f"{({'float32': 'f32', 'bfloat16': 'bf16', 'int8': 's8'})[cache.k.dtype.name]}[{len(cache.k)},2,4]"

    def step(token, cache):
        return layer(token, cache=cache)

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(inputs(length=1), cache).compile()
    program = compiled.as_text() or ""
    assert naive.copies(program, array) == []
    assert "custom-call" in naive.makers(program, array) <= {"parameter", "custom-call", "get-tuple-element"}
    donating = eqx.filter_jit(step, donate="all")
    token = inputs(length=1)
    for _ in range(3):
        token, cache = donating(token, cache)
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)[:2]] == where
    assert cache.length == 3


def test_a_loop_copies_no_cache():
    layer = make(output_size=SIZE, rope_theta=100.0)

    def loop(cache, x):
        def step(carry, _):
            out, cache = layer(carry[0], cache=carry[1])
            return (out, cache), out

        return jax.lax.scan(step, (x, cache), length=5)

    cache = layer.init_cache(512)
    program = jax.jit(loop, donate_argnums=0).lower(cache, inputs(length=1)).compile()
    assert naive.copies(program.as_text() or "", "f32[512,2,4]") == []
    where = cache.k.unsafe_buffer_pointer()
    (_, cache), _ = program(cache, inputs(length=1))
    assert cache.k.unsafe_buffer_pointer() == where
