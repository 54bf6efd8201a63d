"""Layers as Equinox has Modules: in each other, made by constructors, generic, returned; and how long things live."""

import abc
import gc
import threading
import weakref
from typing import Any, ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from ..layers import Scale
from .layers import PureWave, W, Wave, X, assert_close, struct, values


class Affine(eqxc.Layer):
    """Its kernel calls that of another layer."""

    inner: Scale
    bias: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        self.inner.kernel(ctx, out, x)
        np.asarray(out)[...] += np.asarray(self.bias)

    def reference(self, x):
        return self.inner(x) + self.bias


def test_layers_of_layers():
    layer = Affine(Scale(jnp.asarray(W)), jnp.asarray(X))
    assert_close(layer(X), X * W + X)
    gradient = jax.grad(lambda layer: layer(X).sum())(layer)
    assert_close((gradient.inner.weight, gradient.bias), (X, np.ones(3, np.float32)))
    assert_close(jax.hessian(lambda layer: (layer(X) ** 2).sum())(layer).bias.bias, 2 * np.eye(3, dtype=np.float32))
    assert_close(jax.vmap(layer)(X[None])[0], X * W + X)


class Model(eqx.Module):
    first: Wave
    rest: list[Any]

    def __call__(self, x):
        x = self.first(x)
        for layer in self.rest:
            x = layer(x)
        return x


def test_layers_in_a_model():
    def results(first):
        model = Model(first, [eqx.nn.Linear(3, 3, key=jax.random.key(0)), jax.nn.relu, Scale(jnp.asarray(W))])
        loss = lambda model, xs: (jax.vmap(model)(xs) ** 2).sum()
        return eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, values(4, 3))

    assert_close(results(Wave(jnp.asarray(W))), results(PureWave(jnp.asarray(W))), 1e-4)


def test_one_layer_used_twice():
    gradient = jax.grad(lambda layer: layer(layer(X)).sum())(Scale(jnp.asarray(W)))
    assert_close(gradient.weight, 2 * X * W)


class Made(eqxc.Layer):
    """With a constructor, converters, and a key that it ignores, as layers of `eqx.nn` do."""

    weight: jax.Array = eqx.field(converter=jnp.asarray)
    size: int = eqx.field(static=True)
    vmap_method = "fold"

    def __init__(self, size, *, key):
        self.size = size
        self.weight = jax.random.normal(key, (size,))

    def kernel(self, ctx, out, x, *, key=None):
        assert key is None or key.dtype == np.uint32
        np.multiply(x, self.weight, out=np.asarray(out))

    def reference(self, x, *, key=None):
        return x * self.weight


def test_constructors():
    key = jax.random.key(0)
    layer = Made(3, key=key)
    want = X * layer.weight
    for got in (layer(X), layer(X, key=key), eqx.nn.Sequential([layer, eqx.nn.Identity()])(jnp.asarray(X), key=key)):
        assert_close(got, want)
    assert_close(jax.vmap(lambda x, key: layer(x, key=key))(X[None], key[None])[0], want)
    assert eqx.filter_vmap(lambda key: Made(3, key=key)(X))(jax.random.split(key, 2)).shape == (2, 3)
    shapes = eqx.filter_eval_shape(lambda key: Made(3, key=key), key)
    assert eqx.filter_eval_shape(shapes, X) == struct(X)


def test_a_key_that_the_kernel_does_not_take():
    layer, key = Scale(jnp.asarray(W)), jax.random.key(0)
    x = jnp.asarray(X)
    sequential = eqx.nn.Sequential([layer, layer])
    for got in (sequential(x), sequential(x, key=key), jax.jit(lambda x, key: sequential(x, key=key))(x, key)):
        assert_close(got, X * W * W)
    with pytest.raises(
        TypeError, match=r"Scale: a call takes \(x\); got 1 positional arguments and the keywords \['kye'\]"
    ):
        layer(x, kye=key)


def test_super_and_call():
    class Flat(Scale):
        def __call__(self, x):
            return super().__call__(x.reshape(-1)).reshape(x.shape)

    layer = Flat(jnp.asarray(W))
    assert_close(layer(X[None]), (X * W)[None])
    assert_close(jax.vmap(layer)(X[None, None]), (X * W)[None, None])
    assert_close(jax.grad(lambda x: layer(x).sum())(X[:, None]), W[:, None])


Scalar = TypeVar("Scalar")


def test_generic_and_abstract():
    class Of(Scale, Generic[Scalar]):
        pass

    class Abstract(eqxc.Layer):
        weight: eqx.AbstractVar[jax.Array]
        vmap_method = "fold"

        @abc.abstractmethod
        def kernel(self, ctx, out, x):
            raise NotImplementedError

        def reference(self, x):
            return x * self.weight

    class Concrete(Abstract):
        weight: jax.Array

        def kernel(self, ctx, out, x):
            np.multiply(x, self.weight, out=np.asarray(out))

    assert_close(Of[jax.Array](jnp.asarray(W))(X), X * W)
    assert_close(Concrete(jnp.asarray(W))(X), X * W)
    abstract: Any = Abstract
    with pytest.raises(TypeError, match="abstract"):
        abstract()


def test_a_layer_that_returns_itself():
    class Accumulate(eqxc.Layer):
        total: jax.Array
        name: str = "a name"
        input_output_aliases: ClassVar[Any] = {"self.total": "total"}
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            assert out.name == "a name"
            np.asarray(out.total)[...] += np.asarray(x)

        def reference(self, x):
            return eqx.tree_at(lambda layer: layer.total, self, self.total + x)

    layer = Accumulate(jnp.asarray(W))
    assert isinstance(layer(X), Accumulate)
    assert_close(layer(X)(X).total, W + X + X)
    arrays, static = eqx.partition(layer, eqx.is_array)
    step = lambda arrays, x: (eqx.filter(eqx.combine(arrays, static)(x), eqx.is_array), None)
    assert_close(jax.lax.scan(step, arrays, np.stack([X, X]))[0].total, W + X + X)
    assert_close(jax.grad(lambda x: layer(x).total.sum())(X), np.ones(3, np.float32))


def test_kernels_can_be_tested_alone():
    out = np.zeros(3, np.float32)
    Scale(jnp.asarray(W)).kernel(None, eqxc.Buffer(out), eqxc.Buffer(X))
    np.testing.assert_array_equal(out, X * W)


def test_a_kernel_that_calls_a_layer():
    class Outer(Scale):
        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = Scale(jnp.asarray(np.array(self.weight)))(np.array(x))

    layer = Outer(jnp.asarray(W))
    for f in (layer, jax.jit(lambda x: layer(x)), jax.vmap(layer, in_axes=None, axis_size=1)):
        assert_close(jnp.reshape(f(X), (3,)), X * W)


def test_threads():
    class New(Wave):
        """Nobody has called it yet."""

    want = PureWave(jnp.asarray(W))(X)
    failures = []

    def work(i):
        for _ in range(10):
            scale = np.float32(i)
            got = New(jnp.asarray(W))(X) * scale
            gradient = jax.jit(jax.grad(lambda x: New(jnp.asarray(W))(x).sum()))(X)
            if not (np.allclose(got, want * scale) and np.allclose(gradient, np.cos(X) * W**2)):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_clear_caches():
    layer, f = Wave(jnp.asarray(W)), jax.jit(lambda layer, x: jax.grad(lambda x: layer(x).sum())(x))
    for _ in range(2):
        assert_close(layer(X), PureWave(jnp.asarray(W))(X))
        assert_close(f(layer, X), np.cos(X) * W**2)
        jax.clear_caches()
        gc.collect()


def test_a_program_owns_its_kernel():
    def make():
        factor = np.float32(3)

        class Local(eqxc.Layer):
            vmap_method = "fold"

            def kernel(self, ctx, out, x):
                np.multiply(x, factor, out=np.asarray(out))

            def reference(self, x):
                return x * 3

        return jax.jit(Local().__call__).lower(X).compile()

    program = make()
    jax.clear_caches()
    gc.collect()
    assert_close(program(X), 3 * X)


@pytest.mark.parametrize("fails", [False, True])
def test_arrays_are_not_kept(fails):
    class Kept(Scale):
        def kernel(self, ctx, out, x):
            if fails:
                raise KeyError("in a kernel")
            np.multiply(x, self.weight, out=np.asarray(out))

    def use():
        weight = jnp.ones(1000)
        layer, x = Kept(weight), jnp.ones(1000)
        for f in (
            lambda: layer(x),
            lambda: jax.grad(lambda layer: layer(x).sum())(layer),
            lambda: jax.vmap(layer)(x[None]),
            lambda: jax.jvp(layer, (x,), (x,)),
            lambda: jax.jit(lambda layer: layer(x))(layer),
        ):
            try:
                jax.block_until_ready(f())
            except jax.errors.JaxRuntimeError:
                assert fails
        return weakref.ref(weight)

    kept = use()
    gc.collect()
    assert kept() is None
