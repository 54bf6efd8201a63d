"""Types and shapes of operands."""

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqxcallback as eqxc

from .layers import Identity, W, Wave, X, lowered, struct


# Typed keys: kernels have the words.


class Keys(eqxc.Layer):
    key: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, key, x):
        assert self.key.dtype == key.dtype == np.uint32
        np.copyto(np.asarray(out["own"]), np.asarray(self.key))
        np.copyto(np.asarray(out["key"]), np.asarray(key))
        np.multiply(x, np.float32(2), out=np.asarray(out["x"]))

    def reference(self, key, x):
        return {"own": self.key, "key": key, "x": 2 * x}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys(impl):
    own_key, key = jax.random.key(7, impl=impl), jax.random.key(1, impl=impl)
    for f in (Keys(own_key), eqx.filter_jit(Keys(own_key))):
        out = f(key, X)
        assert out["own"] == own_key
        assert out["key"] == key
        assert out["key"].dtype == key.dtype
        np.testing.assert_array_equal(out["x"], 2 * X)
    assert "custom_call @eqxcallback" not in lowered(Keys(own_key).__call__, key, X, platform="tpu")
    gradient = jax.grad(lambda x: Keys(own_key)(key, x)["x"].sum())
    np.testing.assert_array_equal(gradient(X), np.full(3, 2))
    np.testing.assert_array_equal(jax.vmap(gradient)(X[None]), np.full((1, 3), 2))


@pytest.mark.parametrize("method", ["fold", "sequential", "sequential_unrolled", "broadcast_all"])
def test_typed_keys_under_vmap(method):
    class Mapped(Keys):
        vmap_method = method

    keys = jax.random.split(jax.random.key(0), 4).reshape(2, 2)
    own_key = jax.random.key(7)
    assert (jax.vmap(jax.vmap(Mapped(own_key), (0, None)), (0, None))(keys, X)["key"] == keys).all()
    assert (jax.vmap(Mapped(own_key), (None, 0))(own_key, np.stack([X, W]))["key"] == own_key).all()
    ensemble = eqx.filter_vmap(lambda layer: layer(own_key, X))(Mapped(keys[0]))
    assert (ensemble["own"] == keys[0]).all()
    _, scanned = jax.lax.scan(lambda c, key: (c, Mapped(own_key)(key, X)["key"]), 0, keys[1])
    assert (scanned == keys[1]).all()


# Types of operands.

DTYPES = [
    *("bool", "int8", "uint8", "int16", "int32", "uint32", "float16", "float32", "complex64", "bfloat16", "int4"),
    *("uint4", "int2", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2"),
]


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    x = np.array([[1, 0, 1], [1, 1, 0]]).astype(dtype)
    for f in (Identity(), jax.jit(Identity().__call__), jax.vmap(Identity())):
        got = f(jnp.asarray(x))
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got), x)


class IdentityWithBackward(Identity):
    def backward(self, ctx, grads, args, out, cotangents):
        assert grads[1].dtype == cotangents.dtype == args[0].dtype
        np.copyto(np.asarray(grads[1]), np.asarray(cotangents))


@pytest.mark.parametrize("layer", [Identity(), IdentityWithBackward()])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float4_e2m1fn"])
def test_gradients_of_small_floats(name, layer):
    x = jnp.asarray([[1, 0, 1], [1, 1, 0]]).astype(name)
    gradient = jax.grad(lambda x: layer(x).astype(jnp.float32).sum())
    for f in (gradient, jax.vmap(gradient)):
        assert f(x).dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(f(x), np.float32), np.ones((2, 3)))


def test_numpy_inputs():
    for x in (np.float32(3), np.int32(3), np.bool_(True), np.arange(6).reshape(2, 3).T, np.arange(3.0)[::-1]):
        got = Identity()(x)
        assert got.dtype == jnp.asarray(x).dtype  # of 32 bits
        np.testing.assert_array_equal(got, x)
    x = X.copy()
    Wave(jnp.asarray(W))(x)
    np.testing.assert_array_equal(x, X)


def test_x64(x64):
    for x in (np.arange(3.0), np.arange(3), jnp.float64(2), np.complex128(1j)):
        got = Identity()(x)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, x)


def test_results_follow_x64():
    class Positions(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = np.arange(x.shape[0])

        def reference(self, x):
            return jnp.arange(x.shape[0])

    assert Positions()(X).dtype == jnp.int32
    with jax.enable_x64(True):
        assert Positions()(X).dtype == jnp.int64
    assert Positions()(X).dtype == jnp.int32


def test_weak_types():
    """A Python number in an array gives way to other dtypes in JAX; in a kernel it has the dtype that it has."""
    weak = jnp.asarray(3.0)
    assert weak.weak_type
    for f in (Identity(), jax.jit(Identity().__call__)):
        assert not f(weak).weak_type
    assert jax.jit(Identity().__call__)(3.0).dtype == jnp.float32
    assert jax.grad(Identity())(3.0) == 1
    with pytest.raises(TypeError, match="Python's numbers are static"):
        Identity()(3.0)
    _, out = jax.lax.scan(lambda c, _: (Identity()(c), c), jnp.float32(2), length=2)
    np.testing.assert_array_equal(out, [2, 2])


@pytest.mark.parametrize("layer", [Identity(), IdentityWithBackward(), Wave(jnp.ones(()))])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 2)])
def test_no_elements(shape, layer):
    x = jnp.zeros(shape)
    gradient = jax.grad(lambda x: layer(x).sum())
    for f in (layer, gradient, jax.vmap(layer), jax.vmap(gradient), jax.jit(lambda x: layer(x))):
        assert f(x).shape == shape
    if isinstance(layer, Wave):
        assert jax.grad(lambda layer: layer(x).sum())(layer).weight == 0


def test_read_only_inputs():
    class Writes(Identity):
        def kernel(self, ctx, out, x):
            np.asarray(x)[...] = 0

    with pytest.raises(eqxc.KernelError, match="read-only"):
        Writes()(X)


def wide(dtype, function="out_type"):
    """A layer whose results, or residuals, have the dtype."""

    class Wide(eqxc.Layer):
        def kernel(self, ctx, out, x):
            np.copyto(np.asarray(out), np.asarray(x), casting="unsafe")

        def backward(self, ctx, grads, args, out, cotangents):
            raise NotImplementedError

    of_x = lambda self, x: struct(x)
    wide_type = lambda self, x: jax.ShapeDtypeStruct(x.shape, dtype)
    return type("Wide", (Wide,), {"out_type": of_x, function: wide_type})()


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64, np.complex128])
def test_results_of_64_bits(dtype):
    """JAX has no such types without x64, and `jax.pure_callback` refuses them as well."""
    text = rf"expected results without 64-bit types, because jax_enable_x64 is off; got {np.dtype(dtype)}\[3\]\. Return"
    for f in (wide(dtype), jax.jit(wide(dtype).__call__)):
        with pytest.raises(ValueError, match=rf"^Wide\.out_type: {text}"):
            f(X)
        with jax.enable_x64(True):
            assert f(X).dtype == dtype
    with pytest.raises(ValueError, match=rf"^Wide\.residual_type: {text}"):
        wide(dtype, "residual_type")(X)
