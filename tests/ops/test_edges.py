"""Values at the edges of what a kernel can represent, and dtypes at the edges of what it can copy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import _ext, ops, reference


pytestmark = pytest.mark.usefixtures("isa")


def blocks(encoding, rows, features, seed=0):
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, features // 32, ops.ENCODINGS[encoding]), np.uint8)
    heads = 2 if encoding == "Q4_1" else 1
    scales = rng.normal(scale=0.1, size=(rows, features // 32, heads)).astype(np.float16)
    data[..., : 2 * heads] = scales.view(np.uint8)
    return jnp.asarray(data.reshape(rows, -1))


def exact(x, weights, encoding):
    return np.asarray(x, np.float64) @ np.asarray(reference.dequantize(weights, encoding=encoding), np.float64).T


@pytest.mark.parametrize("encoding", list(ops.ENCODINGS))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_reaches_every_result(value, encoding):
    weights = blocks(encoding, 9, 64)
    product = jax.jit(lambda x: ops.quantized_linear(x, weights, encoding=encoding))
    for index in range(64):
        out = product(jnp.ones(64).at[index].set(value))
        touched = reference.dequantize(weights, encoding=encoding)[:, index] != 0
        assert not np.isfinite(out)[np.asarray(touched)].any(), index
        if np.isnan(value):
            assert np.isnan(out).all(), index


@pytest.mark.parametrize("encoding", list(ops.ENCODINGS))
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e30, 1e34])
def test_quantized_linear_has_one_precision_for_all_magnitudes(scale, encoding):
    weights = blocks(encoding, 40, 96)
    x = jnp.asarray(np.random.default_rng(1).normal(size=96).astype(np.float32) * np.float32(scale))
    out, expected = ops.quantized_linear(x, weights, encoding=encoding), exact(x, weights, encoding)
    magnitude = (
        np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(reference.dequantize(weights, encoding=encoding))).T
    )
    assert (np.abs(np.asarray(out, np.float64) - expected) <= 2e-6 * magnitude).all()


@pytest.mark.parametrize("encoding", list(ops.ENCODINGS))
def test_quantized_linear_near_overflow(encoding):
    weights = blocks(encoding, 40, 64)
    x = jnp.full(64, 1e36, jnp.float32).at[::2].set(-1e36)
    if "avx512" not in _ext.isa():
        x = x / 100  # there the sums of a block are not scaled: they have to fit
    np.testing.assert_allclose(
        ops.quantized_linear(x, weights, encoding=encoding), exact(x, weights, encoding), rtol=1e-4, atol=1e33
    )


@pytest.mark.parametrize("encoding", list(ops.ENCODINGS))
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x80, 0x7F])
def test_extreme_weights_and_activations(fill, encoding):
    heads = 4 if encoding == "Q4_1" else 2
    data = np.full((9, 2, ops.ENCODINGS[encoding]), fill, np.uint8)
    data[..., :heads] = np.asarray([1.0] * (heads // 2), np.float16).view(np.uint8)
    weights = jnp.asarray(data.reshape(9, -1))
    for top in (1.0, np.nextafter(np.float32(1), np.float32(0)), np.nextafter(np.float32(1), np.float32(2)), -1.0):
        x = jnp.full(64, top, jnp.float32)
        np.testing.assert_allclose(
            ops.quantized_linear(x, weights, encoding=encoding), exact(x, weights, encoding), rtol=1e-6
        )


def test_an_infinite_value_of_the_last_key():
    q, k = jnp.ones((2, 8)), jnp.ones((5, 1, 8))
    v = jnp.ones((5, 1, 8)).at[4].set(jnp.inf)
    assert (ops.decode_attention(q, k, v, 5) == jnp.inf).all()
    assert (ops.decode_attention(q, k, v, 4) == 1).all()


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.int8, jnp.bool_, jnp.float16, jnp.complex64, jnp.uint32])
def test_cache_append_of_any_dtype(dtype):
    cache, rows = jnp.zeros((6, 3), dtype), jnp.ones((2, 3), dtype)
    out = ops.cache_append(cache, rows, 3)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out.astype(jnp.complex64)[:, 0], [0, 0, 0, 1, 1, 0])


def test_cache_append_of_keys():
    keys = jax.random.split(jax.random.key(0), 6)
    out = ops.cache_append(keys, keys[:2], 4)
    assert (jax.random.key_data(out)[4:] == jax.random.key_data(keys)[:2]).all()


@pytest.mark.parametrize(
    ("position", "first"), [(np.uint32(2**31 + 5), 4), (np.int32(-3), 0), (np.int32(2**31 - 1), 4), (np.uint8(255), 4)]
)
def test_positions_out_of_range_are_clamped(position, first):
    out = ops.cache_append(jnp.zeros((6, 1)), jnp.ones((2, 1)), position)
    assert np.flatnonzero(out).tolist() == [first, first + 1]


@pytest.mark.parametrize("length", [np.uint32(2**32 - 1), np.int32(2**31 - 1), np.int16(30_000)])
def test_lengths_out_of_range_are_clamped(length):
    q, k = jax.random.normal(jax.random.key(0), (2, 8)), jax.random.normal(jax.random.key(1), (5, 1, 8))
    np.testing.assert_array_equal(ops.decode_attention(q, k, k, length), ops.decode_attention(q, k, k, 5))


def test_positions_of_64_bits(x64):
    for position, first in ((np.int64(2**32), 4), (np.int64(-(2**40)), 0), (np.uint64(2**63), 4)):
        out = ops.cache_append(jnp.zeros((6, 1)), jnp.ones((2, 1)), position)
        assert np.flatnonzero(out).tolist() == [first, first + 1]
