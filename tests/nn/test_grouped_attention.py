"""Grouped-query attention, against its formula."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback.testing
from eqxcallback import nn
from eqxcallback.nn._grouped_attention import alibi_slopes

from . import naive
from .grouped import (
    BIASES,
    COMBINED,
    HEAD,
    HEADS,
    KEY,
    KV_HEADS,
    LENGTH,
    OPTIONS,
    OUT,
    SIZE,
    close,
    inputs,
    make,
    naively,
    same,
    text,
)
from .naive import normal, quickly_compiled


pytestmark = pytest.mark.any_jax_version


# The formula.


@pytest.mark.parametrize("options", OPTIONS, ids=text)
def test_values_and_gradients(options):
    layer = make(**options)
    x = inputs()
    arrays, rest = eqx.partition(layer, eqx.is_array)

    def both(call):
        def loss(arrays, x):
            out = call(eqx.combine(arrays, rest), x)
            return jnp.sum(jnp.sin(out)), out

        return quickly_compiled(jax.value_and_grad(loss, (0, 1), has_aux=True))(arrays, x)

    ((_, out), gradients), ((_, wanted_out), wanted) = both(lambda layer, x: layer(x)), both(naively)
    assert out.shape == (LENGTH, OUT)
    close(out, wanted_out)
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        close(got, want, 2e-5)


def test_as_many_key_heads_as_queries_is_multihead_attention():
    ours = nn.GroupedQueryAttention(3, 12, causal=False, key=KEY)
    theirs = eqx.nn.MultiheadAttention(3, 12, key=KEY)
    assert (ours.num_kv_heads, ours.head_size, ours.output_size) == (3, 4, 12)
    x = jnp.asarray(normal(0, 5, 12))
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(got, want)
    close(quickly_compiled(ours.__call__)(x), quickly_compiled(theirs.__call__)(x, x, x))


@pytest.mark.parametrize("options", [{}, COMBINED], ids=text)
def test_second_order(options):
    layer, x, direction = make(**options), inputs(), inputs(seed=1)

    def twice(call):
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(call(x))))
        return quickly_compiled(jax.grad(lambda x: jnp.vdot(gradient(x), direction)))(x)

    close(twice(layer), twice(lambda x: naively(layer, x)), 1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("options", [{}, COMBINED], ids=text)
def test_dtypes(dtype, options):
    layer = make(dtype=dtype, **options)
    assert layer.query_proj.weight.dtype == dtype
    x = inputs().astype(dtype)
    got = quickly_compiled(layer.__call__)(x)
    assert got.dtype == dtype
    close(
        got.astype(jnp.float32),
        naively(layer, x.astype(jnp.float32)),
        {jnp.bfloat16: 2.0**-5, jnp.float16: 2.0**-8}[dtype],
    )


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20])
def test_alibi_slopes_of_any_number_of_heads(heads):
    got = alibi_slopes(heads)
    assert len(got) == heads
    np.testing.assert_allclose(got, naive.slopes(heads), rtol=1e-12)


# What a call takes.


def test_bias_and_mask():
    layer, x = make(), inputs()
    for heads in ((), (1,), (HEADS,)):
        bias, mask = jnp.asarray(normal(1, *heads, LENGTH, LENGTH)), normal(2, *heads, LENGTH, LENGTH) > -1
        same(layer, x, bias=bias, mask=jnp.asarray(mask), expected={"bias": bias, "mask": mask})


@pytest.mark.parametrize("options", [{}, {"causal": False, "window": 3}, COMBINED], ids=text)
def test_keys_of_another_sequence(options):
    same(make(**options), inputs(length=5), inputs(seed=1))
    same(make(**options), inputs(), inputs(seed=1, length=5))


@pytest.mark.parametrize("options", [{}, {"causal": False}, COMBINED], ids=text)
def test_packed_sequences_are_separate(options):
    layer, x = make(**options), inputs()
    ends = [0, 4, 9, LENGTH]
    ids = jnp.repeat(jnp.array([3, 1, 2], jnp.int32), np.diff(ends), total_repeat_length=LENGTH)
    packed = same(layer, x, segment_ids=ids, expected={"segments": (np.asarray(ids), np.asarray(ids))})
    for start, stop in itertools.pairwise(ends):
        close(packed[start:stop], naively(layer, x[start:stop]))


def test_segments_of_queries_and_keys():
    of_queries, of_keys = np.array([0, 0, 1, 1, 2], np.int32), np.repeat(np.array([1, 0, 3], np.int32), [5, 4, 4])
    segments = jnp.asarray(of_queries), jnp.asarray(of_keys)
    layer, x = make(causal=False, **BIASES), inputs(length=5)
    got = same(layer, x, inputs(seed=1), segment_ids=segments, expected={"segments": (of_queries, of_keys)})
    np.testing.assert_array_equal(got[4], layer.output_proj.bias)


@pytest.mark.parametrize("options", [{"causal": False}, COMBINED], ids=text)
def test_padding(options):
    """Values and gradients do not know what the padding is."""
    layer, x = make(**options), inputs()
    count = 8
    got = same(layer, x, length=count)
    same(layer, x, length=jnp.int32(count), expected={"length": count})
    other = x.at[count:].set(jnp.nan)
    for implementation in ("auto", "reference"):
        same_layer = make(**options, implementation=implementation)
        call = quickly_compiled(lambda x, layer=same_layer: layer(x, length=count))
        np.testing.assert_array_equal(call(other)[:count], call(x)[:count])
    close(got[:count], naively(layer, x[:count]))
    gradient = quickly_compiled(jax.grad(lambda x: jnp.sum(layer(x, length=count)[:count])))(x)
    np.testing.assert_array_equal(gradient[count:], np.zeros((LENGTH - count, SIZE)))


def test_dropout():
    layer, x = make(dropout_p=0.3, **COMBINED), inputs()
    key = jax.random.key(7)
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (LENGTH, LENGTH)))(jax.random.split(key, HEADS))
    scaled = kept.astype(jnp.float32) / 0.7
    got = same(layer, x, key=key, expected={"kept": scaled})
    assert np.abs(got - naively(layer, x)).max() > 0.01
    same(layer, x, inference=True, expected={})
    same(eqx.nn.inference_mode(layer), x)
    same(make(), x, key=key, expected={})
    with pytest.raises(RuntimeError, match=r"GroupedQueryAttention: expected a key, for dropout; got none"):
        layer(x)
    f = naive.quickly_filter_jitted(eqx.filter_grad(lambda layer, call: jnp.sum(jnp.sin(call(layer)))))
    gradients = f(layer, lambda layer: layer(x, key=key)), f(layer, lambda layer: naively(layer, x, kept=scaled))
    for mine, want in zip(*map(jax.tree.leaves, gradients), strict=True):
        close(mine, want, 2e-5)


# Edges.


def test_a_row_that_sees_nothing_gives_zeros():
    layer, x = make(**BIASES), inputs()
    mask = jnp.ones((LENGTH, LENGTH), bool).at[3].set(False)
    got = quickly_compiled(lambda x: layer(x, mask=mask))(x)
    np.testing.assert_array_equal(got[3], layer.output_proj.bias)
    np.testing.assert_array_equal(
        quickly_compiled(lambda x: layer(x, length=0))(x), np.broadcast_to(layer.output_proj.bias, (LENGTH, OUT))
    )
    gradient = quickly_compiled(jax.grad(lambda x: jnp.sum(layer(x, mask=mask)[3])))(x)
    np.testing.assert_array_equal(gradient, np.zeros((LENGTH, SIZE)))


@pytest.mark.parametrize("options", [{}, COMBINED], ids=text)
def test_an_empty_sequence(options):
    layer = make(**options)
    assert quickly_compiled(layer.__call__)(inputs(length=0)).shape == (0, OUT)
    got = quickly_compiled(layer.__call__)(inputs(length=3), inputs(length=0))
    bias = jnp.zeros(OUT) if layer.output_proj.bias is None else layer.output_proj.bias
    np.testing.assert_array_equal(got, np.broadcast_to(bias, (3, OUT)))


def test_large_logits():
    layer, x = make(), inputs()
    layer = eqx.tree_at(lambda x: x.key_proj.weight, layer, layer.key_proj.weight * 1e4)
    q, k = (np.asarray(x @ linear.weight.T) for linear in (layer.query_proj, layer.key_proj))
    assert np.abs(np.einsum("sd,td->st", q[:, :HEAD], k[:, :HEAD])).max() / 2 > 1e4
    got = quickly_compiled(layer.__call__)(x)
    close(got, naively(layer, x), 1e-2)
    gradient = quickly_compiled(jax.grad(lambda x: jnp.sum(layer(x))))(x)
    assert np.all(np.isfinite(gradient))


def test_vmap():
    layer, x = make(**COMBINED), inputs(3)
    lengths = jnp.array([5, 13, 0])
    got = quickly_compiled(jax.vmap(lambda x, n: layer(x, length=n)))(x, lengths)
    for i, n in enumerate([5, 13, 0]):
        close(got[i], naively(layer, x[i], length=n))


@pytest.mark.parametrize("implementation", ["reference", "native"])
def test_implementations(implementation):
    same(make(implementation=implementation, rope_theta=100.0), inputs())


def test_check():
    layer = make(**COMBINED)
    eqxcallback.testing.check(lambda layer, x: layer(x), layer, inputs(length=5), reference=naively, only=naive.ROWS)


def test_mistakes():
    layer, x = make(), inputs()
    for wrong in (x[0], x[:, 1:], x[None]):
        with pytest.raises(
            ValueError, match=r"GroupedQueryAttention: expected x and kv of shape \(sequence, 10\); got x"
        ):
            layer(wrong)
    with pytest.raises(ValueError, match=r"expected num_kv_heads to divide num_heads, 6; got 4"):
        make(num_kv_heads=4)
    with pytest.raises(ValueError, match=r"expected an even head_size for a rotary embedding; got 3"):
        make(head_size=3, rope_theta=100.0)
    with pytest.raises(ValueError, match=r"expected a window of at least 1, or None; got 0"):
        make(window=0)
    cases: Any = (
        ((0, 8), {}, r"num_heads to be an integer of at least 1; got 0\."),
        ((2.0, 8), {}, r"num_heads to be an integer of at least 1; got 2\.0\."),
        ((2, 0), {}, r"query_size to be an integer of at least 1; got 0\."),
        ((8, 4), {}, r"head_size to be an integer of at least 1; got 0\. By default it is query_size // num_heads\."),
        ((2, 8), {"num_kv_heads": "2"}, r"num_kv_heads to be an integer; got '2'\."),
        ((2, 8), {"output_size": -1}, r"output_size to be an integer of at least 0; got -1\."),
        ((2, 8), {"window": "3"}, r"a window of at least 1, or None; got '3'\."),
        ((2, 8), {"soft_cap": 0}, r"soft_cap to be a positive number or None; got 0\."),
        ((2, 8), {"rope_theta": "1e4"}, r"rope_theta to be a positive number or None; got '1e4'\."),
    )
    for args, options, expected in cases:
        with pytest.raises(ValueError, match=f"GroupedQueryAttention: expected {expected}"):
            nn.GroupedQueryAttention(*args, **options, key=KEY)
    for call, name in (
        (lambda: layer([[1.0] * SIZE]), "x"),
        (lambda: layer(x, [[1.0] * SIZE]), "kv"),
        (lambda: layer(x, bias=[[1.0]]), "bias"),
        (lambda: layer(x, mask=[[True]]), "mask"),
    ):
        with pytest.raises(TypeError, match=rf"GroupedQueryAttention: expected {name} to be an array; got list\. `jnp"):
            call()
    cache = layer.init_cache(8)
    with pytest.raises(
        ValueError, match=r"expected neither kv, segment_ids nor dropout with a cache; got kv, segment_ids"
    ):
        layer(x, x, cache=cache, segment_ids=jnp.zeros(LENGTH, jnp.int32))
    with pytest.raises(ValueError, match=r"with a cache; got dropout. Dropout is off with `inference=True`"):
        make(dropout_p=0.1)(x, cache=cache, key=KEY)
    with pytest.raises(ValueError, match=r"KVCache.update: expected not more tokens than the 8 entries"):
        layer(x, cache=cache)
    ring = nn.KVCache(8, KV_HEADS, HEAD, window=3)
    for window in (None, 4):
        with pytest.raises(
            ValueError, match=rf"whose window is {window}; got a ring buffer of 3. `init_cache` makes one"
        ):
            make(window=window)(x, cache=ring)


def test_sizes_of_numpy_are_those_of_python():
    two: Any = np.int64(2)
    layer = nn.GroupedQueryAttention(2, 8, window=3, key=KEY)
    made = nn.GroupedQueryAttention(two, 4 * two, window=two + 1, num_kv_heads=two, key=KEY)
    assert [type(size) for size in (made.num_heads, made.query_size, made.num_kv_heads, made.window)] == [int] * 4
    assert eqx.tree_equal(made, layer)
    x = jnp.asarray(normal(0, 5, 8))
    np.testing.assert_array_equal(made(x), layer(x))
