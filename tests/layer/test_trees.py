"""Trees: arrays and options anywhere in a layer, in its arguments and in its results."""

import copy
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .layers import W, X, assert_close, struct


# The layer's own arrays and static fields.


class Inner(eqx.Module):
    arrays: list[Any]
    name: str


class Nested(eqxc.Layer):
    inner: Inner
    tree: dict[str, Any]
    pair: tuple[jax.Array, None]
    numpy: np.ndarray
    linear: eqx.nn.Linear
    activation: Callable[..., Any]
    number: float
    size: int = eqx.field(static=True)
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        assert type(self) is Nested
        assert type(self.inner) is Inner
        assert (self.inner.name, self.number, self.size, self.pair[1]) == ("a name", 0.5, 3, None)
        assert self.inner.arrays[1:] == [None, "text", 7]
        assert self.activation is jax.nn.relu
        assert self.linear.in_features == 3
        buffers = [self.inner.arrays[0], self.tree["a"][0], self.pair[0], self.numpy, self.linear.weight]
        assert all(isinstance(buffer, eqxc.Buffer) and not buffer.writeable for buffer in buffers)
        total = np.asarray(x) * self.number
        for buffer in buffers:
            total = total + np.asarray(buffer).sum()
        np.asarray(out)[...] = total

    def reference(self, x):
        arrays = (self.inner.arrays[0], self.tree["a"][0], self.pair[0], self.numpy, self.linear.weight)
        return x * self.number + sum(array.sum() for array in arrays)


def make_nested():
    return Nested(
        Inner([jnp.ones(2), None, "text", 7], "a name"),
        {"a": [jnp.ones((2, 2))], "b": None},
        (jnp.ones(()), None),
        np.ones(4, np.float32),
        eqx.nn.Linear(3, 3, key=jax.random.key(0)),
        jax.nn.relu,
        0.5,
        3,
    )


def test_arrays_anywhere_in_the_tree():
    layer = make_nested()
    for got in (layer(X), eqx.filter_jit(layer)(X), jax.vmap(layer)(X[None])[0]):
        assert_close(got, layer.reference(jnp.asarray(X)))
    gradient = eqx.filter_grad(lambda layer: layer(X).sum())(layer)
    assert_close(gradient.tree["a"][0], jnp.full((2, 2), 3.0))
    assert_close(gradient.numpy, np.full(4, 3, np.float32))


def test_a_number_becomes_an_operand_when_it_is_traced():
    class Affine(eqxc.Layer):
        scale: Any
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            kinds.append(type(self.scale))
            np.multiply(x, np.float32(np.asarray(self.scale)), out=np.asarray(out))

        def reference(self, x):
            return x * jnp.asarray(self.scale, x.dtype)

    kinds: list[type] = []
    assert_close(Affine(2.0)(X), 2 * X)
    assert_close(eqx.filter_jit(lambda layer, x: layer(x))(Affine(2.0), X), 2 * X)
    assert_close(jax.jit(lambda layer, x: layer(x))(Affine(2.0), X), 2 * X)
    assert kinds == [float, float, eqxc.Buffer]
    assert_close(jax.grad(lambda layer: layer(X).sum())(Affine(2.0)).scale, X.sum())


# Arguments.


class Sum(eqxc.Layer):
    """Weights tell which argument is which."""

    vmap_method = "fold"

    def kernel(self, ctx, out, x, y=2.0, *rest, scale, offset=3.0, **named):
        seen.append((y, [type(a) for a in rest], scale, offset, sorted(named)))
        total = np.asarray(x) + 10 * np.float32(np.asarray(y))
        for i, array in enumerate(rest):
            total = total + np.float32(100 * 2**i) * np.asarray(array)
        total = total * np.float32(np.asarray(scale)) + np.float32(np.asarray(offset))
        for name, array in named.items():
            total = total + np.float32(len(name)) * np.asarray(array)
        np.asarray(out)[...] = total

    def reference(self, x, y=2.0, *rest, scale, offset=3.0, **named):
        total = x + 10 * jnp.asarray(y, x.dtype)
        for i, array in enumerate(rest):
            total = total + 100 * 2**i * array
        total = total * jnp.asarray(scale, x.dtype) + jnp.asarray(offset, x.dtype)
        for name, array in named.items():
            total = total + len(name) * array
        return total


seen: list[Any] = []

ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "defaults": ((X,), {"scale": 1.0}),
    "by keyword": ((), {"x": X, "y": 1.0, "scale": 2.0}),
    "positional": ((X, X[0]), {"scale": 1.0, "offset": -1.0}),
    "rest": ((X, 1.0, W, X), {"scale": X[1]}),
    "named": ((X,), {"scale": 1.0, "zz": X, "a": W}),
    "all": ((X, 1.0, W), {"scale": 1.0, "offset": W[0], "zz": X, "a": W}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_kind_of_argument(name):
    args, kwargs = ARGUMENTS[name]
    want = Sum().reference(*args, **kwargs)
    assert_close(Sum()(*args, **kwargs), want)
    assert_close(eqx.filter_jit(Sum())(*args, **kwargs), want)


def test_arguments_that_are_not_arrays_are_static():
    def double(x):
        return 2 * x

    class Static(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x, mode, options, f=double):
            assert mode == "rows"
            assert options == {"k": (1, None, True), "a": [2.5]}
            assert type(options["k"][0]) is int
            assert options["k"][2] is True
            np.asarray(out)[...] = f(np.asarray(x))

        def out_type(self, x, mode, options, f):
            assert (mode, f) == ("rows", double)
            return struct(x)

    layer, options = Static(), {"k": (1, None, True), "a": [2.5]}
    assert_close(layer(X, "rows", options), 2 * X)
    assert_close(jax.jit(lambda x: layer(x, "rows", options=options))(X), 2 * X)
    assert_close(jax.vmap(lambda x: layer(x, "rows", options))(X[None])[0], 2 * X)


class Point(NamedTuple):
    x: Any
    y: Any


def test_trees_in_and_out():
    class Trees(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, point, mixed):
            assert type(point) is Point
            assert type(out["point"]) is Point
            assert (mixed["none"], mixed["name"], out["point"].y, out["none"], out["n"]) == (
                None,
                "n",
                "static",
                None,
                3,
            )
            np.multiply(point.x, mixed["k"][0], out=np.asarray(out["point"].x))
            np.copyto(np.asarray(out["list"][1]), np.asarray(point.y))

        def reference(self, point, mixed):
            return {"point": Point(point.x * mixed["k"][0], "static"), "list": [(), point.y], "none": None, "n": 3}

    def check(out):
        assert (type(out["point"]), out["point"].y, out["none"], out["n"]) == (Point, "static", None, 3)
        assert out["list"][0] == ()
        np.testing.assert_array_equal(out["point"].x, X * W)
        np.testing.assert_array_equal(out["list"][1], W)

    mixed = {"k": (X,), "none": None, "name": "n"}
    check(Trees()(Point(W, W), mixed))
    check(eqx.filter_jit(Trees())(Point(W, W), mixed))
    check(eqx.filter_jit(lambda point: Trees()(point=point, mixed=mixed))(Point(W, W)))


def test_no_arguments_and_no_results():
    class Constant(eqxc.Layer):
        value: int = eqx.field(static=True)
        vmap_method = "fold"

        def kernel(self, ctx, out):
            np.asarray(out)[...] = self.value

        def out_type(self):
            return jax.ShapeDtypeStruct((2,), jnp.int32)

    class Nothing(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            assert out == {"none": None, "empty": (), "text": "t"}

        def reference(self, x):
            return {"none": None, "empty": (), "text": "t"}

    np.testing.assert_array_equal(Constant(3)(), [3, 3])
    np.testing.assert_array_equal(jax.jit(lambda: Constant(4)())(), [4, 4])
    np.testing.assert_array_equal(jax.vmap(lambda x: Constant(5)() + x)(np.arange(2)[:, None]), [[5, 5], [6, 6]])
    want = {"none": None, "empty": (), "text": "t"}
    assert Nothing()(X) == want
    assert jax.vmap(lambda x: (Nothing()(x)["empty"], x))(X)[0] == ()
    np.testing.assert_array_equal(jax.grad(lambda x: (Nothing()(x), x.sum())[1])(X), np.ones(3))


def test_out_type_of_the_reference():
    layer = make_nested()
    assert layer.out_type(X) == jax.ShapeDtypeStruct((3,), jnp.float32)
    assert jax.eval_shape(layer.__call__, X) == jax.ShapeDtypeStruct((3,), jnp.float32)


def test_copies():
    layer = make_nested()
    want = layer(X)
    assert_close(copy.copy(layer)(X), want)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, layer)
    file.seek(0)
    zeros = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_array(x) else x, layer)
    assert_close(eqx.tree_deserialise_leaves(file, zeros)(X), want)
