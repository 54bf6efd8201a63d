"""A layer's kernels, its types of results, and its life as a Module like others."""

import copy
import pickle
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from ..layers import Scale
from ..transform.library import SAXPY
from .layers import WAVES, Identity, PureWave, W, Wave, X, assert_close, calls, lowered, struct


def test_ten_lines():
    layer = Scale(jnp.asarray(W))
    for got in (layer(X), jax.jit(lambda x: layer(x))(X), eqx.filter_jit(layer)(X)):
        np.testing.assert_array_equal(got, X * W)
        assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(jax.vmap(layer)(np.stack([X, W])), np.stack([X * W, W * W]))
    np.testing.assert_array_equal(jax.grad(lambda x: layer(x).sum())(X), W)


@pytest.mark.parametrize("lane", WAVES)
def test_lanes(lane):
    layer = WAVES[lane](jnp.asarray(W), 3)
    for got in (layer(X), jax.jit(lambda layer, x: layer(x))(layer, X)):
        assert_close(got, PureWave(jnp.asarray(W), 3)(X))
    text = lowered(lambda layer, x: layer(x), layer, X)
    assert ("custom_call @eqxcallback_Wave_" in text) == (lane == "native")
    assert ("custom_call @eqxcallback_python" in text) == (lane != "native")


def test_methods_and_properties_work_in_a_kernel():
    class WithMethods(Scale):
        @property
        def doubled(self):
            return 2 * np.asarray(self.weight)

        def helper(self, x):
            return np.asarray(x) * self.doubled

        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = self.helper(x)

        def reference(self, x):
            return x * 2 * self.weight

    assert_close(WithMethods(jnp.asarray(W))(X), 2 * X * W)


# Kernels for platforms.


def scale_body(ctx, out, layer, x):
    assert type(layer) is Kernels
    np.multiply(x, layer.weight, out=np.asarray(out))


class Kernels(Scale):
    kernels: ClassVar[Any] = {"cpu": eqxc.PythonKernel(scale_body), "cuda": "on_cuda"}

    def on_cuda(self, ctx, out, x):
        raise NotImplementedError


def test_a_python_kernel_and_a_method_by_name():
    layer = Kernels(jnp.asarray(W))
    np.testing.assert_array_equal(layer(X), X * W)
    np.testing.assert_array_equal(jax.vmap(layer)(X[None])[0], X * W)
    np.testing.assert_array_equal(jax.grad(lambda x: layer(x).sum())(X), W)
    assert "eqxcallback_python" in lowered(layer.__call__, X, platform="cuda")


def test_one_program_for_several_platforms():
    layer = Kernels(jnp.asarray(W))
    text = jax.jit(layer.__call__).trace(X).lower(lowering_platforms=("cpu", "tpu")).as_text()
    assert text.count("custom_call @eqxcallback_python") == 1
    assert "stablehlo.case" in text


@pytest.mark.parametrize("make", [Scale, Kernels, Wave])
@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_the_reference_is_lowered_where_there_is_no_kernel(make, platform):
    layer = make(jnp.asarray(W))
    for f, x in ((layer, X), (jax.vmap(layer), X[None]), (jax.grad(lambda x: layer(x).sum()), X)):
        text = lowered(lambda x, f=f: f(x), x, platform=platform)
        assert "custom_call" not in text
        assert "stablehlo.multiply" in text


class Axpy(eqxc.Layer):
    a: float = eqx.field(static=True, default=2.0)
    kernels: ClassVar[Any] = {"cpu": eqxc.NativeKernel("Saxpy", SAXPY, attributes=("a",))}
    vmap_method = "fold"

    def reference(self, x, y):
        return self.a * x + y


class AxpyOfArgument(eqxc.Layer):
    kernels: ClassVar[Any] = {"cpu": eqxc.NativeKernel("Saxpy", SAXPY, attributes=("a",))}
    vmap_method = "fold"

    def reference(self, x, y, a=3.0):
        return a * x + y


def test_attributes_of_native_kernels():
    assert_close(Axpy()(X, W), 2 * X + W)
    assert_close(Axpy(-1.0)(X, W), W - X)
    layer = AxpyOfArgument()
    assert_close(layer(X, W), 3 * X + W)
    assert_close(layer(X, W, 4.0), 4 * X + W)
    assert_close(jax.jit(lambda x: layer(x, a=5.0, y=x))(X), 6 * X)
    assert_close(jax.vmap(lambda x: layer(x, W, 2.0))(X[None])[0], 2 * X + W)
    assert_close(jax.grad(lambda x: layer(x, W, 2.0).sum())(X), np.full(3, 2, np.float32))


@pytest.mark.parametrize(("name", "error"), [("alpha", ValueError), ("reference", TypeError)])
def test_an_attribute_that_there_is_not(name, error):
    class Wrong(Axpy):
        kernels: ClassVar[Any] = {"cpu": eqxc.NativeKernel("Saxpy", SAXPY, attributes=(name,))}

    with pytest.raises(error, match=name):
        Wrong()(X, W)


def test_out_type_alone():
    class Square(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            np.square(x, out=np.asarray(out))

        def out_type(self, x):
            assert isinstance(x, jax.ShapeDtypeStruct)
            return struct(x)

    np.testing.assert_array_equal(Square()(X), X * X)
    np.testing.assert_array_equal(jax.vmap(Square())(np.stack([X, W])), np.stack([X * X, W * W]))
    with pytest.raises(ValueError, match=r"Layer .*Square: .*`reference`"):
        lowered(Square().__call__, X, platform="tpu")


# Subclasses of layers that can be used themselves.


def test_subclasses():
    class Tripled(Scale):
        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = 3 * np.asarray(x) * np.asarray(self.weight)

    class OtherDerivative(Scale):
        def reference(self, x):
            return 5 * x * self.weight

    class OtherMethod(Scale):
        vmap_method = "sequential"

        def kernel(self, ctx, out, x):
            calls.append(str(x.shape))
            Scale.kernel(self, ctx, out, x)

    class MoreFields(Scale):
        bias: jax.Array

        def kernel(self, ctx, out, x):
            super().kernel(ctx, out, x)
            np.asarray(out)[...] += np.asarray(self.bias)

        def reference(self, x):
            return super().reference(x) + self.bias

    weight = jnp.asarray(W)
    assert_close(Tripled(weight)(X), 3 * X * W)
    assert_close(Scale(weight)(X), X * W)
    assert_close(OtherDerivative(weight)(X), X * W)
    assert_close(jax.grad(lambda x: OtherDerivative(weight)(x).sum())(X), 5 * W)
    assert_close(jax.vmap(OtherMethod(weight))(np.stack([X, X])), np.stack([X * W] * 2))
    assert calls == ["(3,)", "(3,)"]
    assert_close(MoreFields(weight, weight)(X), X * W + W)


# Debugging modes of JAX.


def test_disable_jit():
    layer = Wave(jnp.asarray(W))
    want = PureWave(jnp.asarray(W))
    with jax.disable_jit():
        for f in (lambda f: f(X), lambda f: jax.jit(lambda x: f(x))(X), lambda f: jax.vmap(f)(X[None])):
            assert_close(f(layer), f(want))
        assert_close(jax.grad(lambda x: layer(x).sum())(X), jax.grad(lambda x: want(x).sum())(X))


def test_debug_nans():
    class Nan(Identity):
        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = np.nan

    with jax.debug_nans(True):
        assert_close(jax.grad(lambda x: Wave(jnp.asarray(W))(x).sum())(X), np.cos(X) * W**2)
        with pytest.raises(FloatingPointError, match=r"\(nan\) encountered in .*Nan"):
            Nan()(X)


# A layer is a Module.


def test_module():
    layer = Wave(jnp.asarray(W))
    assert repr(Wave(layer.weight, 3)) == "Wave(weight=f32[3], power=3)"
    assert eqx.tree_equal(layer, Wave(jnp.asarray(W)))
    assert not eqx.tree_equal(layer, Wave(jnp.asarray(W), 3))
    assert not eqx.tree_equal(layer, Wave(jnp.asarray(X)))
    changed = eqx.tree_at(lambda layer: layer.weight, layer, jnp.asarray(X))
    assert_close(changed(X), PureWave(jnp.asarray(X))(X))
    assert_close(layer(X), PureWave(jnp.asarray(W))(X))
    arrays, static = eqx.partition(layer, eqx.is_array)
    assert_close(eqx.combine(arrays, static)(X), layer(X))
    with pytest.raises(AttributeError):
        layer.power = 3
    assert hash(Identity()) == hash(Identity())
    np.testing.assert_array_equal(jax.jit(Identity())(X), X)


def test_pickle():
    layer = Wave(jnp.asarray(W), 3)
    for copied in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert eqx.tree_equal(layer, copied)
        assert_close(copied(X), layer(X))


def test_the_program_names_the_layer():
    assert "op_call[call=Wave]" in str(eqx.filter_make_jaxpr(Wave(jnp.asarray(W)))(X)[0])


def test_programs_have_the_name_of_the_class():
    layer = Scale(jnp.asarray(W))
    assert (layer.__name__, Scale.__name__, eqxc.Layer.__name__) == ("Scale", "Scale", "Layer")
    for f in (jax.vmap(layer), jax.grad(lambda x: jax.checkpoint(layer)(x).sum())):
        assert f.__name__ != "<unnamed function>"
    assert "module @jit_Scale " in jax.jit(jax.vmap(layer)).lower(X[None]).as_text()


def test_a_layer_may_have_a_name_of_its_own():
    class Named(Scale):
        __name__: str

    class Attribute(Scale):
        __name__ = "of_all"

    layer = Named(jnp.asarray(W), "mine")
    assert (layer.__name__, Named.__name__) == ("mine", "Named")
    assert (Attribute(jnp.asarray(W)).__name__, Attribute.__name__) == ("of_all", "Attribute")
    np.testing.assert_array_equal(layer(X), X * W)
