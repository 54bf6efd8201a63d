"""Layers whose kernels are JAX functions."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import eqxcallback as eqxc


X = np.arange(3, dtype=np.float32) + 1


def ten_times(layer, x, *, shift):
    return 10 * layer.reference(x, shift=shift)


def a_hundred_times(layer, args, out, cotangent):
    """Keyword arguments are the last of `args`."""
    np.testing.assert_array_equal([out.shape, cotangent.shape], 2 * [args[0].shape])

    def reference(layer, x, shift):
        return layer.reference(x, shift=shift)

    return eqx.filter_vjp(reference, layer, *args)[1](100 * cotangent)


class Power(eqxc.Layer):
    """The kernel is ten times the reference, and its gradients a hundred times."""

    weight: Array
    exponent: int
    vmap_method: ClassVar[Any] = "broadcast_all"
    kernels: ClassVar[Any] = {"cpu": eqxc.JaxKernel(ten_times)}
    backward_kernels: ClassVar[Any] = {"cpu": eqxc.JaxKernel(a_hundred_times)}

    def reference(self, x, *, shift):
        return x**self.exponent * self.weight + shift


LAYER = Power(jnp.full(3, 2.0), exponent=2)


@pytest.mark.parametrize("jit", [False, True])
def test_forward_and_backward(jit):
    def loss(layer, x, shift):
        return layer(x, shift=shift).sum()

    gradient = eqx.filter_grad(lambda args: loss(*args))
    value, grads = (eqx.filter_jit if jit else lambda f: f)(lambda args: (loss(*args), gradient(args)))(
        (LAYER, jnp.asarray(X), jnp.ones(3))
    )
    assert value == 10 * np.sum(2 * X**2 + 1)
    np.testing.assert_allclose(grads[0].weight, 100 * X**2)
    np.testing.assert_allclose(grads[1], 400 * X, rtol=1e-6)
    np.testing.assert_array_equal(grads[2], 3 * [100])
    assert [call.lane for call in eqxc.inspect(gradient, (LAYER, X, X)).calls] == ["jax", "jax"]


class Right(Power):
    kernels: ClassVar[Any] = {"cpu": eqxc.JaxKernel(lambda self, x, *, shift: self.reference(x, shift=shift))}
    backward_kernels: ClassVar[Any] = {}


def test_check():
    assert eqxc.testing.check(Right(jnp.full(3, 2.0), exponent=2), X, shift=X).passed


class Residual(eqxc.Layer):
    """Its backward pass reads what the forward pass has kept."""

    vmap_method: ClassVar[Any] = "fold"
    kernels: ClassVar[Any] = {"cpu": eqxc.JaxKernel(lambda self, x: (jnp.exp(x), {"kept": 3 * x}))}
    backward_kernels: ClassVar[Any] = {
        "cpu": eqxc.JaxKernel(lambda self, args, out, cotangent: (self, cotangent * out[1]["kept"]))
    }

    def reference(self, x):
        return jnp.exp(x)

    def residual_type(self, x):
        return {"kept": jax.ShapeDtypeStruct(x.shape, x.dtype)}


def test_residuals():
    np.testing.assert_array_equal(jax.grad(lambda x: Residual()(x).sum())(X), 3 * X)
    x = np.stack([X, 2 * X])
    np.testing.assert_array_equal(jax.grad(lambda x: jax.vmap(Residual())(x).sum())(x), 3 * x)


class Noise(eqxc.Layer):
    """Noise of a typed key, which kernels on buffers see as its words."""

    kernels: ClassVar[Any] = {"cpu": eqxc.JaxKernel(lambda self, key: jax.random.normal(key, (3,)))}

    def out_type(self, key):
        return jax.ShapeDtypeStruct((3,), jnp.float32)


def test_keys():
    np.testing.assert_array_equal(Noise()(jax.random.key(3)), jax.random.normal(jax.random.key(3), (3,)))


class Add(eqxc.Layer):
    kernels: ClassVar[Any] = {"cpu": eqxc.JaxKernel(lambda self, ref, x: _add(ref, x))}

    def out_type(self, ref, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _add(ref, x):
    ref[...] += x
    return 2 * x


def test_refs():
    ref = jax.new_ref(jnp.ones(3))
    np.testing.assert_array_equal(Add()(ref, X), 2 * X)
    np.testing.assert_array_equal(ref[...], 1 + X)


def test_wrong_declarations():
    class Nothing(eqxc.Layer):
        kernels: ClassVar[Any] = {"cpu": eqxc.JaxKernel(lambda: None)}

        def reference(self, x):
            return x

    with pytest.raises(TypeError, match=r"the function of kernels\['cpu'\] to take \(self, ...\)"):
        Nothing()(X)
