"""`QuantizedLinear.packed`: the layer with its rows side by side, and back."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import nn, ops


KEY = jax.random.key(0)


def made(encoding: Any = "Q4_1", out_features: int = 48, **options: Any) -> nn.QuantizedLinear:
    linear = eqx.nn.Linear(96, out_features, key=KEY)
    return nn.QuantizedLinear.from_linear(linear, encoding=encoding, **options)


by_encoding = pytest.mark.parametrize("encoding", list(ops.INTERLEAVED))


@by_encoding
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("options", [{}, {"activations": "int8"}, {"implementation": "reference"}], ids=str)
def test_it_computes_the_same(options, dtype, encoding):
    layer = made(encoding, **options)
    packed = layer.packed()
    assert (packed.encoding, packed.in_features, packed.out_features) == (f"{encoding}_R16", 96, 48)
    assert packed.blocks.shape == layer.blocks.shape
    assert not np.array_equal(packed.blocks, layer.blocks)
    assert (packed.activations, packed.implementation, packed.bias is layer.bias) == (
        layer.activations,
        layer.implementation,
        True,
    )
    for x in (jax.random.normal(KEY, (96,), dtype), jax.random.normal(KEY, (9, 96), dtype)):
        call = (lambda layer, x: layer(x)) if x.ndim == 1 else lambda layer, x: jax.vmap(layer)(x)
        got, want = (eqx.filter_jit(call)(layer, x).astype(jnp.float32) for layer in (packed, layer))
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 if dtype == jnp.float32 else 2.0**-6)
    gradient = jax.grad(lambda x, layer: layer(x).astype(jnp.float32).sum())
    x = jax.random.normal(KEY, (96,), dtype)
    np.testing.assert_allclose(gradient(x, packed), gradient(x, layer), rtol=2.0**-7, atol=1e-5)


@by_encoding
def test_rows_are_those_of_the_layer(encoding):
    layer = made(encoding)
    packed, index = layer.packed(), np.array([[0, 47, 16], [-1, 5, 31]])
    np.testing.assert_array_equal(packed.rows(index), layer.rows(index))
    np.testing.assert_array_equal(packed.rows(np.array(17)), layer.rows(np.array(17)))
    outside = np.array([48, 3])
    np.testing.assert_array_equal(packed.rows(outside), layer.rows(outside))


@by_encoding
def test_it_can_be_undone(encoding):
    layer = made(encoding)
    packed = layer.packed()
    assert packed.packed() is packed
    assert layer.unpacked() is layer
    again = packed.unpacked()
    assert again.encoding == encoding
    np.testing.assert_array_equal(again.blocks, layer.blocks)
    assert jax.tree.structure(again) == jax.tree.structure(layer)


@pytest.mark.parametrize("layer", [made(out_features=47), made("Q8_0", 8), made("int8")], ids=["47 rows", "8", "int8"])
def test_what_has_no_such_form_stays_as_it_is(layer):
    assert layer.packed() is layer
    assert layer.unpacked() is layer


def test_stacked_layers():
    keys = jax.random.split(KEY, 3)
    make = lambda key: nn.QuantizedLinear.from_linear(eqx.nn.Linear(64, 32, key=key), bits=4)
    packed = eqx.filter_vmap(make)(keys).packed()
    assert packed.blocks.shape == (3, 32, 40)
    one = jax.tree.map(lambda x: x[1], packed)
    np.testing.assert_array_equal(one.blocks, make(keys[1]).packed().blocks)

    def step(x, layer):
        return jnp.tile(layer(x), 2), None

    x = jnp.ones(64)
    got, _ = jax.lax.scan(step, x, packed)
    want = x
    for key in keys:
        want = jnp.tile(make(key)(want), 2)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_blocks_of_no_whole_groups_are_refused():
    expected = r"QuantizedLinear: expected uint8 blocks of shape .*, out_features a multiple of 16 \(Q8_0_R16\); got"
    with pytest.raises(ValueError, match=expected):
        nn.QuantizedLinear(jnp.zeros((24, 34), jnp.uint8), "Q8_0_R16")
    with pytest.raises(ValueError, match=r"expected encoding to be one of Q4_1, Q8_0, int8; got 'Q4_1_R16'"):
        made("Q4_1_R16")
    blocks = ops.interleave_rows(jnp.zeros((32, 20), jnp.uint8), encoding="Q4_1")
    assert nn.QuantizedLinear(blocks, "Q4_1_R16").out_features == 32
