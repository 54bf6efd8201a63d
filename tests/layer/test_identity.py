"""Layers and calls that share a program, and those that do not."""

import collections
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxcallback as eqxc

from .layers import X, assert_close, struct, values


traces: collections.Counter[str] = collections.Counter()
compilations: list[str] = []


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        compilations.append(event)


@pytest.fixture(autouse=True)
def listening():
    jax.monitoring.register_event_duration_secs_listener(_listen)
    traces.clear()
    yield
    jax.monitoring.unregister_event_duration_listener(_listen)


class Dense(eqxc.Layer):
    weight: jax.Array
    option: Any = eqx.field(static=True, default=None)
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.asarray(out)[...] = np.asarray(x) @ np.asarray(self.weight)

    def out_type(self, x):
        traces["out_type"] += 1
        return jax.ShapeDtypeStruct((*x.shape[:-1], self.weight.shape[-1]), x.dtype)

    def reference(self, x):
        traces["reference"] += 1
        return x @ self.weight

    def backward(self, ctx, grads, args, out, cotangents):
        x, cotangent = np.asarray(args[0]), np.asarray(cotangents)
        if grads[1] is not None:
            np.asarray(grads[1])[...] = cotangent @ np.asarray(self.weight).T
        if grads[0].weight is not None:
            gradient = np.asarray(grads[0].weight)
            per_example = np.swapaxes(x, -1, -2) @ cotangent
            gradient[...] = per_example if gradient.ndim == per_example.ndim else per_example.sum(0)


INPUTS = jnp.asarray(values(4, 3))


@functools.cache
def weights():
    return [jnp.asarray(values(3, 3) + np.float32(i)) for i in range(4)]


def made(i):
    return Dense(weights()[i])


def mean_square(layer, x):
    return (layer(x) ** 2).mean()


@eqx.filter_jit
def jitted(layer, x):
    traces["jit"] += 1
    return layer(x)


@eqx.filter_jit
def jitted_gradient(layer, x):
    traces["jit"] += 1
    return eqx.filter_grad(mean_square)(layer, x)


@pytest.mark.parametrize(
    "f",
    [
        lambda layer, x: layer(x),
        lambda layer, x: jax.vmap(layer)(x[:, None]),
        eqx.filter_grad(mean_square),
        lambda layer, x: jax.jvp(layer, (x,), (x,)),
        lambda layer, x: jax.vmap(jax.grad(mean_square, 1), (None, 0))(layer, x[:, None]),
        lambda layer, x: jax.hessian(mean_square, 1)(layer, x),
        jitted,
        jitted_gradient,
    ],
    ids=["eager", "vmap", "grad", "jvp", "vmap of grad", "hessian", "jit", "jit of grad"],
)
def test_made_again(f, request):
    """With other arrays, by its constructor or by `eqx.tree_at`."""
    f(made(0), INPUTS)
    before = dict(traces)
    compilations.clear()
    others = [made(1), eqx.tree_at(lambda layer: layer.weight, made(2), weights()[3]), jax.tree.map(jnp.copy, made(1))]
    compilations.clear()
    for layer in others:
        jax.block_until_ready(f(layer, INPUTS))
    assert compilations == []
    if "hessian" not in request.node.name:  # whose eager form evaluates the reference step by step
        assert dict(traces) == before
    assert traces["out_type"] == before.get("out_type", 0)


def test_a_first_call_traces_once():
    class Fresh(Dense):
        pass

    layer = Fresh(weights()[0])
    layer(INPUTS)
    assert dict(traces) == {"out_type": 1, "reference": 1}
    jax.jit(layer.__call__)(INPUTS)
    jax.jit(lambda x: layer(x))(INPUTS)
    Fresh(weights()[1])(INPUTS)
    jax.lax.scan(lambda c, x: (c, layer(x[None])), 0, INPUTS)  # another shape
    assert dict(traces) == {"out_type": 2, "reference": 2}


def test_training_under_jit():
    optimizer = optax.sgd(0.1)

    @eqx.filter_jit
    def step(layer, state, x):
        traces["step"] += 1
        loss, gradient = eqx.filter_value_and_grad(mean_square)(layer, x)
        updates, state = optimizer.update(gradient, state)
        return eqx.apply_updates(layer, updates), state, loss

    layer = made(0)
    state = optimizer.init(eqx.filter(layer, eqx.is_array))
    losses = []
    for i in range(4):
        if i == 1:
            compilations.clear()
        layer, state, loss = step(layer, state, INPUTS)
        losses.append(loss)
    jax.block_until_ready(layer)
    assert compilations == []
    assert traces["step"] == 1
    assert losses[-1] < losses[0]


def test_training_without_jit():
    layer, before = made(0), {}
    for i in range(4):
        if i == 2:
            before, _ = dict(traces), compilations.clear()
            jax.block_until_ready(layer)
        gradient = eqx.filter_grad(mean_square)(layer, INPUTS)
        layer = jax.tree.map(lambda p, g: p - jnp.float32(0.1) * g, layer, gradient)
    jax.block_until_ready(layer)
    assert compilations == []
    assert dict(traces) == before


def test_what_needs_another_program():
    layer = made(0)
    layer(INPUTS)
    before = traces["out_type"]
    for i, other in enumerate((Dense(weights()[0], 2), Dense(weights()[0], 3), Dense(weights()[0], "a name"))):
        other(INPUTS)
        assert traces["out_type"] == before + i + 1
        other(INPUTS)
    layer(INPUTS[:2])
    layer(INPUTS[:2])
    assert traces["out_type"] == before + 4


def test_functions_as_static_arguments():
    class Apply(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x, f):
            np.asarray(out)[...] = f(np.asarray(x))

        def out_type(self, x, f):
            traces["out_type"] += 1
            return struct(x)

    layer, double = Apply(), lambda x: 2 * x
    for _ in range(3):
        assert_close(layer(X, double), 2 * X)
    assert traces["out_type"] == 1
    factories = [lambda x, k=k: k * x for k in range(2, 5)]
    for k, f in enumerate(factories, 2):
        assert_close(layer(X, f), np.float32(k) * X)
        assert_close(jax.jit(lambda x, f=f: layer(x, f))(X), np.float32(k) * X)
    assert traces["out_type"] == 4
    compilations.clear()
    assert_close(layer(X, lambda x: 7 * x), 7 * X)
    assert compilations == []  # one eager program for every kernel of these types
    assert_close(layer(X, functools.partial(np.multiply, np.float32(3))), 3 * X)
    assert_close(jax.jit(lambda x: layer(x, np.negative) + layer(x, np.square))(X), X * X - X)


def test_classes_of_one_name():
    def make(factor):
        class Same(eqxc.Layer):
            vmap_method = "fold"

            def kernel(self, ctx, out, x):
                np.asarray(out)[...] = np.asarray(x) * np.float32(factor)

            def reference(self, x):
                return x * float(factor)

            def backward(self, ctx, grads, args, out, cotangents):
                np.asarray(grads[1])[...] = np.asarray(cotangents) * np.float32(factor)

        return Same()

    two, three = make(2), make(3)
    assert type(two).__qualname__ == type(three).__qualname__
    for f in (lambda x: (two(x), three(x)), jax.jit(lambda x: (two(x), three(x)))):
        assert_close(f(X), (2 * X, 3 * X))
    assert_close(jax.vmap(two)(X), 2 * X)
    assert_close(jax.vmap(three)(X), 3 * X)
    assert jax.grad(lambda x: two(x) + three(three(x)))(1.0) == 11
