"""Multi-head attention, against Equinox's."""

import io
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback.testing
from eqxcallback import nn

from . import naive
from .naive import normal, quickly_compiled


pytestmark = pytest.mark.any_jax_version

KEY = jax.random.key(3)
QUERIES, KEYS, HEADS = 5, 7, 3
SIZES = {
    "as one": (6, {}),
    "all different": (6, {"key_size": 4, "value_size": 8, "output_size": 9, "qk_size": 5, "vo_size": 2}),
    "larger values": (6, {"qk_size": 1, "vo_size": 10}),
}
BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}


def both(size=6, **options) -> Any:
    return tuple(make(HEADS, size, key=KEY, **options) for make in (nn.MultiheadAttention, eqx.nn.MultiheadAttention))


def inputs(layer, dtype=jnp.float32, queries=QUERIES, keys=KEYS, batch=()):
    shapes = ((queries, layer.query_size), (keys, layer.key_size), (keys, layer.value_size))
    return [jnp.asarray(normal(i, *batch, *shape, dtype=dtype)) for i, shape in enumerate(shapes)]


def mask(*heads, seed=0):
    """Each query sees some key."""
    seen = normal(seed, *heads, QUERIES, KEYS) > 0
    seen[..., 2] = True
    return jnp.asarray(seen)


def same(ours, theirs, *args, tolerance=1e-5, **options):
    """The results of both layers."""
    got, want = (quickly_compiled(lambda *args, f=f: f(*args, **options))(*args) for f in (ours, theirs))
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_allclose(
        got.astype(jnp.float32), want.astype(jnp.float32), rtol=tolerance, atol=tolerance * np.abs(want).max(initial=0)
    )
    return got


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("options", [{}, BIASES], ids=["", "biases"])
def test_it_is_equinox(sizes, options):
    size, more = SIZES[sizes]
    ours, theirs = both(size, **more, **options)
    assert isinstance(ours, eqx.nn.MultiheadAttention)
    for got, want in zip(*(jax.tree.leaves(layer) for layer in (ours, theirs)), strict=True):
        np.testing.assert_array_equal(got, want)
    names = [*eqx.nn.MultiheadAttention.__dataclass_fields__]
    assert list(ours.__dataclass_fields__) == [*names, "implementation"]
    for name in names[5:]:
        assert getattr(ours, name) == getattr(theirs, name)
    arrays = inputs(ours)
    same(ours, theirs, *arrays)
    same(ours, theirs, *arrays, mask())
    same(ours, theirs, *arrays, mask(HEADS))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes(dtype):
    ours, theirs = both(dtype=dtype)
    assert ours.query_proj.weight.dtype == dtype
    # Equinox rounds the logits and the weights.
    tolerance = {jnp.bfloat16: 2.0**-5, jnp.float16: 2.0**-8}[dtype]
    assert same(ours, theirs, *inputs(ours, dtype), mask(), tolerance=tolerance).dtype == dtype


def test_in_f64(x64):
    ours, theirs = both()
    got = same(ours, theirs, *inputs(ours, jnp.float64), mask(), tolerance=1e-13)
    assert got.dtype == jnp.float64


def rotary(q, k, v):
    rope = jax.vmap(eqx.nn.RotaryPositionalEmbedding(q.shape[-1]), in_axes=1, out_axes=1)
    return rope(q), rope(k), v


def test_process_heads():
    ours, theirs = both(12)
    same(ours, theirs, *inputs(ours), process_heads=rotary)
    with pytest.raises(ValueError, match="process_heads must not change the shape of the heads"):
        ours(*inputs(ours), process_heads=lambda q, k, v: (q, k[1:], v))
    with jax.numpy_dtype_promotion("standard"):

        def of_16_bits(q, k, v):
            return q.astype(jnp.bfloat16), k, v

        same(ours, theirs, *inputs(ours), process_heads=of_16_bits, tolerance=2.0**-7)


@pytest.mark.parametrize("per_head", [False, True])
def test_dropout_is_that_of_equinox(per_head):
    """The very same weights are dropped."""
    ours, theirs = both(dropout_p=0.4)
    arrays, key = inputs(ours), jax.random.key(5)
    seen = mask(*([HEADS] if per_head else []))
    got = same(ours, theirs, *arrays, seen, key=key)
    same(ours, theirs, *arrays, key=jax.random.PRNGKey(5))
    plain = same(ours, theirs, *arrays, seen, inference=True)
    assert np.abs(got - plain).max() > 0.01
    same(*eqx.nn.inference_mode((ours, theirs)), *arrays, seen)
    same(ours, theirs, *arrays, seen, key=key, inference=False)
    for layer in (ours, theirs):
        with pytest.raises(RuntimeError, match=r"Dropout requires a key when running in non-deterministic mode"):
            layer(*arrays)
    same(*both(), *arrays, key=key)
    same(*both(dropout_p=1.0), *arrays, key=key)


def test_dropout_of_a_batch():
    ours, theirs = both(dropout_p=0.4)
    arrays, keys = inputs(ours, batch=(4,)), jax.random.split(KEY, 4)
    got, want = (
        quickly_compiled(jax.vmap(lambda q, k, v, key, f=f: f(q, k, v, key=key)))(*arrays, keys) for f in (ours, theirs)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


def test_a_rate_that_is_an_array():
    ours, theirs = (eqx.tree_at(lambda x: x.dropout.p, layer, jnp.asarray(0.4)) for layer in both(dropout_p=0.5))
    same(ours, theirs, *inputs(ours), key=KEY)


class Half(eqx.nn.Dropout):
    def __call__(self, x, *, key=None, inference=None, deterministic=None):
        return x / 2


@pytest.mark.parametrize("dropout", [Half(0.0, inference=False), Half(0.3, inference=False)])
def test_what_stands_for_the_dropout_is_called(dropout):
    ours, theirs = (eqx.tree_at(lambda x: x.dropout, layer, dropout) for layer in both(dropout_p=0.5))
    got = same(ours, theirs, *inputs(ours))
    assert not np.allclose(got, both()[0](*inputs(ours)))


def test_deterministic():
    ours, theirs = both(dropout_p=0.4)
    arrays = inputs(ours)
    for layer in (ours, theirs):
        with pytest.warns(UserWarning, match=r"MultiheadAttention\(\)\(deterministic=...\) is deprecated") as caught:
            layer(*arrays, deterministic=True)
        assert layer is theirs or caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, want = (quickly_compiled(lambda f=f: f(*arrays, deterministic=True))() for f in (ours, theirs))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


def test_vmap():
    ours, theirs = both()
    same(*map(jax.vmap, (ours, theirs)), *inputs(ours, batch=(4,)))
    arrays = inputs(ours)
    seen = jnp.stack([mask(seed=i) for i in range(4)])
    got, want = (
        quickly_compiled(jax.vmap(lambda q, seen, f=f: f(q, *arrays[1:], seen), in_axes=(None, 0)))(arrays[0], seen)
        for f in (ours, theirs)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("sizes", ["as one", "all different"])
def test_it_learns(sizes):
    size, more = SIZES[sizes]
    layers = both(size, **more, **BIASES, dropout_p=0.3)
    arrays = inputs(layers[0])
    grad = eqx.filter_grad(lambda all, seen: jnp.sum(jnp.sin(all[0](*all[1], seen, key=KEY))))
    compiled = naive.quickly_filter_jitted(grad)
    got, want = (jax.tree.leaves(compiled((layer, arrays), mask(HEADS))) for layer in layers)
    assert len(got) == 11
    for mine, other in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_second_order():
    layers = both()
    arrays = inputs(layers[0])
    seen, direction = mask(), jnp.asarray(normal(9, QUERIES, 6))

    def twice(layer):
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(layer(x, *arrays[1:], seen))))
        return jax.grad(lambda x: jnp.vdot(gradient(x), direction))(arrays[0])

    got, want = (quickly_compiled(lambda layer=layer: twice(layer))() for layer in layers)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# What Equinox's layer has not.


def test_a_row_that_sees_nothing_gives_zeros():
    ours, _ = both(**BIASES)
    seen = mask().at[1].set(False)

    def rows(*arrays):
        return ours(*arrays, seen)

    got = quickly_compiled(rows)(*inputs(ours))
    np.testing.assert_array_equal(got[1], ours.output_proj.bias)
    gradients = quickly_compiled(jax.grad(lambda *arrays: jnp.sum(rows(*arrays)[1]), (0, 1, 2)))(*inputs(ours))
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))


@pytest.mark.parametrize("per_head", [None, False, True])
def test_causal(per_head):
    ours, theirs = both()
    arrays = inputs(ours)
    seen = None if per_head is None else mask(*([HEADS] if per_head else []))
    lower = jnp.tri(QUERIES, KEYS, KEYS - QUERIES, dtype=bool)
    allowed = lower if seen is None else seen & jnp.broadcast_to(lower, seen.shape)
    got = quickly_compiled(lambda: ours(*arrays, seen, causal=True))()
    np.testing.assert_allclose(got, quickly_compiled(lambda: theirs(*arrays, allowed))(), rtol=1e-5, atol=2e-6)


def test_causal_as_equinox_computes_it():
    """The layer takes complex numbers, which the op is not for."""
    ours, theirs = both(dtype=jnp.complex64)
    arrays = inputs(ours, jnp.complex64)
    lower = jnp.tri(QUERIES, KEYS, KEYS - QUERIES, dtype=bool)
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, want = ours(*arrays, mask(), causal=True), theirs(*arrays, mask() & lower)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0), (0, 0)])
def test_empty_sequences(queries, keys):
    """Equinox's layer has none."""
    ours, _ = both(**BIASES)
    got = quickly_compiled(ours.__call__)(*inputs(ours, queries=queries, keys=keys))
    np.testing.assert_array_equal(got, np.broadcast_to(ours.output_proj.bias, (queries, 6)))


def test_large_logits():
    ours, theirs = both()
    arrays = inputs(ours)
    arrays[0] = arrays[0] * 1e5
    layers = [eqx.tree_at(lambda x: x.key_proj.weight, layer, ours.key_proj.weight * 10) for layer in (ours, theirs)]
    got = same(*layers, *arrays, tolerance=1e-3)
    assert np.all(np.isfinite(got))


@pytest.mark.parametrize("implementation", ["reference", "native"])
def test_implementations(implementation):
    ours, theirs = nn.MultiheadAttention(HEADS, 6, key=KEY, implementation=implementation), both()[1]
    same(ours, theirs, *inputs(ours))


@pytest.mark.wrong_types
def test_an_unknown_implementation():
    ours = nn.MultiheadAttention(HEADS, 6, key=KEY, implementation="fast")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"expected implementation to be one of auto, .*; got 'fast'"):
        ours(*inputs(ours))


def test_mistakes():
    ours, theirs = both()
    q, k, v = inputs(ours)
    for layer in (ours, theirs):
        with pytest.raises(ValueError, match="key and value must both be sequences of equal length"):
            layer(q, k, v[1:])
        with pytest.raises(ValueError, match=r"mask must have shape .*\(5, 7\)"):
            layer(q, k, v, jnp.ones((7, 5), bool))
        for wrong in (q[0], q[None]):
            with pytest.raises(ValueError, match="values to unpack"):
                layer(wrong, k, v)
    with pytest.raises(ValueError, match=r"or that for each of 3 heads\. Got"):
        ours(q, k, v, jnp.ones((2, QUERIES, KEYS), bool))


def test_serialised_as_equinox_does():
    first, second = both(**BIASES)
    changed = [jax.tree.map(lambda x: x + 1 if eqx.is_array(x) else x, layer) for layer in (first, second)]
    for source, target in zip(changed, (second, first), strict=True):
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, source)
        file.seek(0)
        read = eqx.tree_deserialise_leaves(file, target)
        assert type(read) is type(target)
        for got, want in zip(jax.tree.leaves(read), jax.tree.leaves(source), strict=True):
            np.testing.assert_array_equal(got, want)


def test_check():
    """Against Equinox's call of the same parameters."""
    ours, _ = both()

    def call(layer, *args):
        return layer(*args)

    eqxcallback.testing.check(
        call, ours, *inputs(ours), mask(HEADS), reference=eqx.nn.MultiheadAttention.__call__, only=naive.ROWS
    )
