"""JAX's settings around a call hold for all of the call, which is traced when the `with` blocks have ended."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.transform import Settings, settings


X = jnp.float32(1)
NO_KERNEL = {"cuda": eqxc.PythonKernel(lambda ctx, out, *args: None)}


def third(x):
    """A value in f32 that is right only with 64 bits inside."""
    wide = jnp.asarray(x, jnp.float64) if settings().enable_x64 else x
    return ((wide + 1e-9) - wide).astype(jnp.float32)


def under(context, function):
    def inside(*args):
        with context():
            return function(*args)

    return inside


def by_reference(function):
    return eqxc.Op("by_reference", NO_KERNEL, function, vmap_method="fold")


def by_kernel(function):
    return eqxc.Op("by_kernel", {"cpu": eqxc.JaxKernel(function)}, function, vmap_method="fold")


def layer_with(**methods):
    def by_layer(function):
        def call(self, *args):
            return function(*args)

        names = (
            {"vmap_method": "fold", "kernels": NO_KERNEL, "reference": call} if not methods else {"vmap_method": "fold"}
        )
        return type("ByLayer", (eqxc.Layer,), {**names, **{n: make(call) for n, make in methods.items()}})()

    return by_layer


by_layer = layer_with()
by_kernel_of_layer = layer_with(kernels=lambda call: {"cpu": eqxc.JaxKernel(call)}, reference=lambda call: call)
EVERY = pytest.mark.parametrize("make", [by_reference, by_kernel, by_layer, by_kernel_of_layer])


@EVERY
def test_64_bits_inside(make):
    call = under(lambda: jax.enable_x64(True), make(third))
    expected = np.float32(1e-9)
    for got in (call(X), jax.jit(call)(X), jax.vmap(call)(X[None])[0], jax.jit(jax.vmap(call))(X[None])[0]):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert make(third)(X) == 0
    assert jax.jit(make(third))(X) == 0


@EVERY
def test_results_of_64_bits(make):
    call = under(lambda: jax.enable_x64(True), make(lambda x: jnp.asarray(x, jnp.float64) / 3))
    with jax.enable_x64(True):
        assert jax.jit(call)(X) == call(X) == np.float64(1) / 3


@EVERY
def test_matmul_precision(make):
    call = make(jnp.matmul)
    a = jnp.ones((4, 4))

    def lowered(function):
        return jax.jit(function).lower(a, a).as_text()

    highest = under(lambda: jax.default_matmul_precision("highest"), call)
    assert "HIGHEST" in lowered(highest)
    assert "HIGHEST" not in lowered(call)
    both = lowered(lambda a, b: highest(a, b) + call(a, b))
    assert both.count("HIGHEST") == 2
    assert both.count("stablehlo.dot_general") == 2
    tangents = lowered(lambda a, b: jax.jvp(highest, (a, b), (a, b)))
    assert tangents.count("stablehlo.dot_general") == tangents.count("HIGHEST") / 2 == 3
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" not in lowered(under(lambda: jax.default_matmul_precision(None), call))


@EVERY
def test_promotion(make):
    def mixed(x):
        return x + jnp.arange(3)[None] * jnp.ones(3)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        call = make(mixed)

        def allowed(x):
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return call(x)

        np.testing.assert_array_equal(jax.jit(allowed)(jnp.ones(3)), [[1, 2, 3]])
        with pytest.raises(Exception, match="romotion"):
            jax.jit(call)(jnp.ones(3))


@EVERY
def test_random_numbers(make):
    def noisy(x):
        return x + jax.random.uniform(jax.random.PRNGKey(0), (8,))

    def legacy():
        return jax.threefry_partitionable(not settings().threefry_partitionable)

    x = jnp.zeros(8)
    call = make(noisy)
    for context in (legacy, lambda: jax.default_prng_impl("rbg")):
        expected = under(context, noisy)(x)
        assert not np.array_equal(expected, noisy(x))
        np.testing.assert_array_equal(jax.jit(under(context, call))(x), expected)
        np.testing.assert_array_equal(jax.jit(call)(x), noisy(x))


def test_rules_of_a_layer():
    class Product(eqxc.Layer):
        kernels = NO_KERNEL

        def reference(self, a):
            return a @ a

        def jvp(self, args, tangents):
            return tangents[0] @ args[0] + args[0] @ tangents[0]

        def batch(self, axis_size, in_axes, args):
            return args[0] @ args[0], 0

    a = jnp.ones((4, 4))
    call = under(lambda: jax.default_matmul_precision("highest"), Product())
    inner = jax.jit(call)
    for function, x in ((lambda x: jax.jvp(inner, (x,), (x,)), a), (jax.vmap(inner), a[None])):
        text = jax.jit(function).lower(x).as_text()
        assert text.count("stablehlo.dot_general") == text.count("HIGHEST") / 2 > 0


def test_each_setting_is_set_by_the_function_of_its_name():
    others = Settings(True, "highest", "rbg", False, "strict", "raise")
    with others.applied():
        assert settings() == others
