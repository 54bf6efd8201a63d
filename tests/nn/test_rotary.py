"""RotaryPositionalEmbedding: what tests/nn/test_drop_ins.py does not say of all layers."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import nn


def normal(*shape, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def formula(x, theta):
    """As complex numbers, in f64."""
    length, size = x.shape
    angles = np.arange(length)[:, None] * theta ** (-np.arange(0, size, 2) / size)
    turned = (x[:, : size // 2] + 1j * x[:, size // 2 :]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def test_each_layer_has_its_own_theta():
    """In whichever order they are called, and beside Equinox's, which shares one table."""
    x = normal(9, 6)
    layers = [nn.RotaryPositionalEmbedding(6, theta) for theta in (10_000.0, 100.0, 7.0)]
    for _ in range(2):
        for layer in layers:
            np.testing.assert_allclose(layer(x), formula(x, layer.theta), atol=1e-5)
            np.testing.assert_allclose(jax.jit(layer)(x), formula(x, layer.theta), atol=1e-5)
    eqx.clear_caches()
    np.testing.assert_allclose(eqx.nn.RotaryPositionalEmbedding(6)(x), formula(x, 10_000.0), atol=1e-5)


def test_lengths_in_any_order():
    layer = nn.RotaryPositionalEmbedding(4)
    for length in (3, 9, 1, 0, 5):
        x = normal(length, 4)
        np.testing.assert_allclose(layer(x), formula(x, 10_000.0), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_tables_have_the_precision_of_the_dtype(dtype):
    """As in Equinox: an input in f32 with a table in 16 bits is rotated by rounded sines."""
    ours, theirs = (module.RotaryPositionalEmbedding(6, dtype=dtype) for module in (nn, eqx.nn))
    assert ours.dtype == theirs.dtype == dtype
    x = normal(5, 6)
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_allclose(ours(x), theirs(x), atol=1e-6)
        got, want = ours(x.astype(jnp.float16)), theirs(x.astype(jnp.float16))
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=0.02)


def test_strict_promotion_refuses_another_dtype():
    layer = nn.RotaryPositionalEmbedding(4)
    with pytest.raises(ValueError, match=r"expected x of the layer's dtype, float32; got float16\. .*cast x") as caught:
        layer(jnp.ones((3, 4), jnp.float16))
    with pytest.raises(type(caught.value)):
        eqx.nn.RotaryPositionalEmbedding(4)(jnp.ones((3, 4), jnp.float16))


@pytest.mark.parametrize("shape", [(3, 5), (3,), (2, 3, 4)])
def test_other_shapes_are_refused(shape):
    for module in (nn, eqx.nn):
        with pytest.raises(ValueError, match=r"embedding_size|unpack"):
            module.RotaryPositionalEmbedding(4)(jnp.ones(shape))


def test_heads_are_one_call():
    layer = nn.RotaryPositionalEmbedding(6)
    heads = normal(5, 2, 6)
    got = jax.vmap(layer, in_axes=1, out_axes=1)(heads)
    for head in range(2):
        np.testing.assert_allclose(got[:, head], formula(heads[:, head], 10_000.0), atol=1e-5)
    text = jax.jit(jax.vmap(layer, in_axes=1, out_axes=1)).lower(heads).as_text()
    assert text.count("custom_call @eqxcallback_rotary_embedding(") == 1
    assert "tensor<2x5x1x6xf32>, tensor<5x3xf32>, tensor<5x3xf32>" in text
    assert "while" not in text
