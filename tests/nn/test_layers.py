"""Layers that Equinox lacks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import nn, ops


def normal(seed, *shape, dtype: Any = np.float32) -> Any:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def quantized(encoding, out_features, in_features):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (out_features, in_features // 32, ops.ENCODINGS[encoding]), np.uint8)
    blocks[..., 1] = 0x2C  # scales near 1 / 16
    if encoding == "Q4_1":
        blocks[..., 3] = 0xB4  # minimums near -1 / 4
    return nn.QuantizedLinear(jnp.asarray(blocks.reshape(out_features, -1)), encoding)


@pytest.mark.parametrize("encoding", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_quantized_linear(encoding, dtype):
    layer = quantized(encoding, 12, 96)
    assert (layer.in_features, layer.out_features) == (96, 12)
    weights = ops.dequantize(layer.blocks, encoding=encoding)
    x = normal(1, 5, 96, dtype=dtype)
    want = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    tolerance = {"rtol": 2.0**-8 if dtype == jnp.bfloat16 else 0, "atol": 1e-5 * np.abs(want).max()}
    for got in (jax.jit(jax.vmap(layer))(x), np.stack([layer(row, key=None) for row in np.asarray(x)])):
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(jnp.float32), want, **tolerance)
    np.testing.assert_array_equal(layer.rows(jnp.array([[3, 0], [11, 3]])), weights[np.array([[3, 0], [11, 3]])])
    gradient = jax.jit(jax.grad(lambda x: layer(x).astype(jnp.float32).sum()))(x[0])
    np.testing.assert_allclose(gradient.astype(jnp.float32), weights.sum(0), rtol=2.0**-7, atol=1e-4)


KEY = jax.random.key(0)
IN_A_ROW = {
    "Linear": lambda: nn.Linear(32, 32, key=KEY),
    "MLP": lambda: nn.MLP(32, 32, 32, 1, key=KEY),
    "LayerNorm": lambda: nn.LayerNorm(32),
    "RMSNorm": lambda: nn.RMSNorm(32),
    "GroupNorm": lambda: nn.GroupNorm(4, 32),
    "SwiGLU": lambda: nn.SwiGLU(32, 32, key=KEY),
    "GEGLU": lambda: nn.GEGLU(32, 32, key=KEY),
    "QuantizedLinear": lambda: quantized("Q8_0", 32, 32),
    "RotaryPositionalEmbedding": lambda: nn.RotaryPositionalEmbedding(8),
    "GroupedQueryAttention": lambda: nn.GroupedQueryAttention(2, 32, key=KEY),
    "Embedding": lambda: nn.Embedding(5, 32, key=KEY),
}


@pytest.mark.parametrize("name", IN_A_ROW)
def test_sequential(name):
    """`Sequential` passes a key to each layer, or `None`."""
    layer = IN_A_ROW[name]()
    shape = {"RotaryPositionalEmbedding": (4, 8), "GroupedQueryAttention": (3, 32), "Embedding": ()}.get(name, (32,))
    x = jnp.ones(shape, int if name == "Embedding" else jnp.float32)
    want = layer(x)
    for key in (None, KEY):
        np.testing.assert_array_equal(nn.Sequential([nn.Identity(), layer])(x, key=key), want)


def test_quantized_linear_refuses():
    blocks = jnp.zeros((3, 34), jnp.uint8)
    with pytest.raises(ValueError, match=r"QuantizedLinear: expected encoding to be one of Q4_0, .*, int8; got 'Q2_K'"):
        nn.QuantizedLinear(blocks, "Q2_K")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"quantized_linear: expected blocks of shape .* 32 features; got x: float32\[33\]"
    ):
        nn.QuantizedLinear(blocks, "Q8_0")(jnp.zeros(33))
