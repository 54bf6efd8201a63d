"""Which layers and calls share a program, and which do not."""

import collections
import dataclasses
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
            each = np.swapaxes(x, -1, -2) @ cotangent
            gradient[...] = each if gradient.ndim == each.ndim else each.sum(0)


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


def mapped(layer, x):
    return jax.vmap(layer, 1, 1)(x[:, None])


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


# Static values that are equal, but not the same.

SAME: list[Any] = [1, True, 1.0, 0, False, 0.0, -0.0, complex(0, -0.0), 0j, 1j]
# Of which Equinox warns if they are a static field themselves.
SAME_OF_NUMPY = [np.float32(0.0), np.float32(-0.0), np.int32(0), np.bool_(False)]


def text(value):
    return f"{type(value).__name__} {value!r}"


class Shows(eqxc.Layer):
    """What it finds in a static field, or in an argument, as a number that no other value has."""

    field: Any = eqx.field(static=True, default=None)
    vmap_method = "fold"

    def kernel(self, ctx, out, x, argument=None):
        np.asarray(out)[...] = self.number(argument)

    def reference(self, x, argument=None):
        return jnp.full(x.shape, float(self.number(argument)))

    def number(self, argument):
        value = self.field if argument is None else argument
        while not isinstance(value, bool | int | float | complex | np.generic):
            value = next(iter(vars(value).values() if dataclasses.is_dataclass(value) else value))
        return [text(v) for v in (*SAME, *SAME_OF_NUMPY)].index(text(value))


@dataclasses.dataclass(frozen=True)
class Config:
    scale: Any


class Module(eqx.Module):
    scale: Any = eqx.field(static=True)


WRAPPERS = {
    "alone": lambda v: v,
    "tuple": lambda v: (v,),
    "nested": lambda v: (((v,),),),
    "frozenset": lambda v: frozenset([v]),
    "dataclass": Config,
    "dataclass in a tuple": lambda v: (Config((v,)),),
    "frozenset in a dataclass": lambda v: Config(frozenset([v])),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
@pytest.mark.parametrize("order", [1, -1])
def test_equal_but_not_the_same(wrap, order):
    values = SAME if jax.tree.leaves(wrap(1)) == [1] else (*SAME, *SAME_OF_NUMPY)
    items = list(enumerate(values))[::order]
    for i, value in items:
        layer = Shows(wrap(value))
        assert layer(X)[0] == i
        assert jax.vmap(layer)(X)[0] == i
    for i, value in items:
        assert Shows()(X, wrap(value))[0] == i
        assert Shows()(X, argument=wrap(value))[0] == i


@pytest.mark.parametrize("wrap", [WRAPPERS["alone"], WRAPPERS["dataclass"]])
def test_equal_but_not_the_same_in_one_program(wrap):
    want = list(range(len(SAME)))
    f = lambda x: [Shows(wrap(value))(x)[0] for value in SAME]
    np.testing.assert_array_equal(jax.jit(f)(X), want)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(X[None, :]), np.reshape(want, (-1, 1)))
    text = jax.jit(f).trace(X).lower(lowering_platforms=("tpu",)).as_text()
    assert all(f"{float(i):.6e}" in text for i in want)


def test_in_the_fields_of_other_modules():
    class Outer(eqxc.Layer):
        inner: Module
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = [text(v) for v in SAME].index(text(self.inner.scale))

        def out_type(self, x):
            return struct(x)

    for i, value in enumerate(SAME):
        assert Outer(Module(value))(X)[0] == i


def test_derivatives_of_the_same_but_not_equal():
    class Power(eqxc.Layer):
        kind: Any = eqx.field(static=True)
        vmap_method = "fold"

        def factor(self):
            return {"int": 1.0, "bool": 10.0, "float": 100.0}[type(self.kind).__name__] * np.copysign(1, self.kind)

        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = np.asarray(x) * np.float32(self.factor())

        def reference(self, x):
            return x * float(self.factor())

        def backward(self, ctx, grads, args, out, cotangents):
            np.asarray(grads[1])[...] = np.asarray(cotangents) * np.float32(self.factor())

    kinds, want = [1, True, 1.0, -0.0, 0.0], [1, 10, 100, -100, 100]
    one = jnp.float32(1)
    assert [float(jax.grad(Power(kind))(one)) for kind in kinds] == want
    assert [float(jax.jvp(Power(kind), (one,), (one,))[1]) for kind in kinds] == want
    assert jax.jit(jax.grad(lambda x: sum(Power(kind)(x) for kind in kinds)))(one) == sum(want)


def test_equal_specifications_are_one():
    calls = []

    class Takes(eqxc.Layer):
        config: Config = eqx.field(static=True)
        vmap_method = "fold"

        def kernel(self, ctx, out, x, f):
            np.asarray(out)[...] = f(np.asarray(x))

        def out_type(self, x, f):
            calls.append(f)
            return struct(x)

    Takes(Config((1, "a")))(X, np.sin)
    Takes(Config((1, "a")))(X, np.sin)
    assert len(calls) == 1
    Takes(Config((1, "b")))(X, np.sin)
    Takes(Config((1, "a")))(X, np.cos)
    assert len(calls) == 3


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


def test_instances_of_which_a_kernel_depends_on_static_fields():
    class Repeat(eqxc.Layer):
        count: int = eqx.field(static=True)
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = np.tile(np.asarray(x), self.count)

        def reference(self, x):
            return jnp.tile(x, self.count)

    for count in (1, 3, 2, 3):
        assert Repeat(count)(X).shape == (3 * count,)
    out = jax.jit(lambda x: [Repeat(count)(x) for count in (1, 2, 3)])(X)
    assert [o.shape[0] for o in out] == [3, 6, 9]


def test_a_leaf_that_is_static_or_traced():
    """Of one class and one value: as a number it is static, as an array it is an operand."""

    class Scale(eqxc.Layer):
        factor: Any
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = np.asarray(x) * np.float32(np.asarray(self.factor))

        def reference(self, x):
            return x * jnp.asarray(self.factor, x.dtype)

    for factor in (2.0, np.float32(2), jnp.float32(2), 2, np.float64(2)):
        assert_close(Scale(factor)(X), 2 * X)
    assert_close(jax.grad(lambda layer: layer(X).sum())(Scale(2.0)).factor, X.sum())


def test_static_dictionaries():
    class Kind(eqxc.Layer):
        options: dict[str, Any] = eqx.field(static=True)
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = ["int", "bool", "float"].index(type(self.options["a"]).__name__)

        def out_type(self, x):
            return struct(x)

    assert [int(Kind({"a": value})(X)[0]) for value in (1, True, 1.0)] == [0, 1, 2]
