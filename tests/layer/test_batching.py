"""The view of kernels under `vmap`, and what comes out of it."""

import itertools
from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import eqxcallback as eqxc

from .layers import NativeWave, PureWave, W, Wave, X, assert_close, compiled, values


METHODS = ("fold", "sequential", "sequential_unrolled", "expand_dims", "broadcast_all")


def with_method(make, method):
    return type(f"{make.__name__}_{method}", (make,), {"vmap_method": method, "__module__": __name__})


shapes: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def no_shapes():
    shapes.clear()


class Product(eqxc.Layer):
    """`sin(x) * y * w ** 2`, which records what it sees. Operands broadcast against each other."""

    w: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x, y):
        shapes.append({"w": self.w.shape, "x": x.shape, "y": y.shape, "out": out.shape})
        np.asarray(out)[...] = np.sin(np.asarray(x)) * np.asarray(y) * np.asarray(self.w) ** 2

    def reference(self, x, y):
        return jnp.sin(x) * y * self.w**2

    def backward(self, ctx, grads, args, out, cotangents):
        gradients = {"dw": grads[0].w, "dx": grads[1], "dy": grads[2]}
        seen = {"w": self.w, "x": args[0], "y": args[1], "out": out, "cotangents": cotangents, **gradients}
        shapes.append({name: None if buffer is None else buffer.shape for name, buffer in seen.items()})
        w, x, y, cotangent = map(np.asarray, (self.w, *args, cotangents))
        for gradient, value in (
            (gradients["dw"], cotangent * np.sin(x) * y * 2 * w),
            (gradients["dx"], cotangent * np.cos(x) * y * w**2),
            (gradients["dy"], cotangent * np.sin(x) * w**2),
        ):
            if gradient is not None:
                gradient.write(value)


def product(w, x, y):
    return jnp.sin(x) * y * w**2


PRODUCTS = {method: with_method(Product, method) for method in METHODS}


def mapped(f, levels):
    for axes in reversed(levels):
        f = jax.vmap(f, axes)
    return f


def operands(levels, *, size=None):
    """Make three operands. With one `size` for all axes an axis that is taken for another would fit."""
    return [values(*((size or 2 + k) for k, axes in enumerate(levels) if axes[i] == 0), 3) for i in range(3)]


# The shapes that docs/batching.md states.


def forward_shapes(method, levels):
    f = mapped(lambda w, x, y: PRODUCTS[method](w)(x, y), levels)
    f(*operands(levels))
    seen = shapes[:]
    shapes.clear()
    return seen


@pytest.mark.parametrize(
    ("method", "axes", "w", "x", "y"),
    [
        ("fold", (None, 0, 0), (3,), (2, 3), (2, 3)),
        ("fold", (None, 0, None), (3,), (2, 3), (3,)),
        ("fold", (0, None, None), (2, 3), (3,), (3,)),
        ("fold", (0, 0, 0), (2, 3), (2, 3), (2, 3)),
        ("expand_dims", (None, 0, None), (1, 3), (2, 3), (1, 3)),
        ("broadcast_all", (None, 0, None), (2, 3), (2, 3), (2, 3)),
        ("broadcast_all", (0, None, None), (2, 3), (2, 3), (2, 3)),
    ],
)
def test_one_axis(method, axes, w, x, y):
    assert forward_shapes(method, [axes]) == [{"w": w, "x": x, "y": y, "out": (2, 3)}]


@pytest.mark.parametrize("method", ["sequential", "sequential_unrolled"])
@pytest.mark.parametrize("axes", [(None, 0, 0), (0, None, None)])
def test_one_example_after_the_other(method, axes):
    assert forward_shapes(method, [axes]) == [{"w": (3,), "x": (3,), "y": (3,), "out": (3,)}] * 2


@pytest.mark.parametrize(
    ("method", "levels", "w", "x", "y", "out"),
    [
        # Nested axes are one axis; what only some of them map is tiled over the others; what none maps is left alone.
        ("fold", [(None, 0, 0), (None, 0, 0)], (3,), (6, 3), (6, 3), (6, 3)),
        ("fold", [(None, 0, None), (None, None, 0)], (3,), (6, 3), (6, 3), (6, 3)),
        ("fold", [(0, 0, None), (None, 0, None)], (6, 3), (6, 3), (3,), (6, 3)),
        ("fold", [(0, None, None), (0, None, None)], (6, 3), (3,), (3,), (6, 3)),
        ("fold", [(None, 0, None)] * 3, (3,), (24, 3), (3,), (24, 3)),
        ("expand_dims", [(None, 0, None), (None, None, 0)], (1, 1, 3), (2, 1, 3), (1, 3, 3), (2, 3, 3)),
        ("broadcast_all", [(None, 0, None), (None, None, 0)], (2, 3, 3), (2, 3, 3), (2, 3, 3), (2, 3, 3)),
    ],
)
def test_nested_axes(method, levels, w, x, y, out):
    assert forward_shapes(method, levels) == [{"w": w, "x": x, "y": y, "out": out}]


@pytest.mark.parametrize("method", ["fold", "broadcast_all"])
def test_tiled_in_the_right_order(method):
    levels = [(None, 0, None), (None, None, 0)]
    args = operands(levels)
    got = mapped(lambda w, x, y: PRODUCTS[method](w)(x, y), levels)(*args)
    assert_close(got, mapped(product, levels)(*args))


def backward_shapes(f, *args):
    f(*args)
    (seen,) = [seen for seen in shapes if "dw" in seen]
    return {name: seen[name] for name in ("dw", "dx", "dy", "cotangents", "w", "x", "y")}


def loss(w, x, y):
    return (PRODUCTS["fold"](w)(x, y) ** 2).sum()


FOLDED = (4, 3)


def test_shared_parameters_are_summed_and_those_of_examples_are_not():
    """A gradient without the leading axis is to be summed over it, one with it is for each example."""
    w, x, y = values(3), values(4, 3), values(3)
    common = {"cotangents": FOLDED, "w": (3,), "x": FOLDED, "y": (3,)}

    grad_of_vmap = jax.grad(lambda w, x, y: jax.vmap(loss, (None, 0, None))(w, x, y).sum(), (0, 1, 2))
    assert backward_shapes(grad_of_vmap, w, x, y) == {"dw": (3,), "dx": FOLDED, "dy": (3,), **common}
    shapes.clear()
    vmap_of_grad = jax.vmap(jax.grad(loss, (0, 1, 2)), (None, 0, None))
    assert backward_shapes(vmap_of_grad, w, x, y) == {"dw": FOLDED, "dx": FOLDED, "dy": FOLDED, **common}
    shapes.clear()
    of_parameters = jax.vmap(jax.grad(loss), (None, 0, None))
    assert backward_shapes(of_parameters, w, x, y) == {"dw": FOLDED, "dx": None, "dy": None, **common}


def test_cotangents_have_the_axes_of_their_result():
    """The cotangent of a sum is a constant, which no map touches: `write` does not broadcast."""

    class Doubled(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            out.write(2 * np.asarray(x))

        def reference(self, x):
            return 2 * x

        def backward(self, ctx, grads, args, out, cotangents):
            shapes.append({"out": out.shape, "cotangents": cotangents.shape})
            grads[1].write(2 * np.asarray(cotangents))

    x = values(2, 5, 3)
    gradient = jax.grad(lambda x: Doubled()(x).sum())
    for f in (gradient, jax.vmap(gradient), jax.vmap(jax.vmap(gradient)), jax.jit(jax.vmap(gradient, 1, 1))):
        np.testing.assert_array_equal(f(x), np.full_like(x, 2))
    assert all(seen["out"] == seen["cotangents"] for seen in shapes)
    shapes.clear()
    np.testing.assert_array_equal(jax.jacrev(Doubled())(x[0, 0]), 2 * np.eye(3))
    assert shapes == [{"out": (3,), "cotangents": (3, 3)}]  # what is not mapped is not tiled


def test_per_example_outside_and_summed_inside():
    """The kernel cannot sum over the inner axis alone: it gives each gradient, and the library sums."""
    w, x, y = values(3), values(2, 5, 3), values(3)

    def inner(w, x, y):
        return jax.vmap(loss, (None, 0, None))(w, x, y).sum()

    f = jax.vmap(jax.grad(inner, (0, 1, 2)), (None, 0, None))
    seen = backward_shapes(f, w, x, y)
    assert seen["dx"] == seen["cotangents"] == seen["x"] == (10, 3)
    assert seen["dw"] == seen["dy"] == (10, 3)
    assert seen["w"] == seen["y"] == (3,)


# Values, for all ways to map operands.

LEVEL = [axes for axes in itertools.product((0, None), repeat=3) if 0 in axes]


def of_product(transform, make, levels, args):
    def f(w, x, y):
        return make(w)(x, y) if make is not None else product(w, x, y)

    def squared(f):
        return jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1, 2))

    transforms = {
        "values": lambda: mapped(f, levels),
        "grad of vmap": lambda: squared(mapped(f, levels)),
        "vmap of grad": lambda: mapped(squared(f), levels),
        "vmap of grad of vmap": lambda: mapped(squared(mapped(f, levels[1:])), levels[:1]),
        "vmap of jvp": lambda: mapped(lambda w, x, y: jax.jvp(f, (w, x, y), (x, y, w))[1], levels),
    }
    return compiled(transforms[transform](), *args)


TRANSFORMS = ["values", "grad of vmap", "vmap of grad", "vmap of grad of vmap", "vmap of jvp"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("axes", [(None, 0, 0), (0, None, 0), (0, None, None), (None, None, 0)], ids=str)
def test_every_method(method, transform, axes):
    args = operands([axes], size=3)
    got = of_product(transform, PRODUCTS[method], [axes], args)
    assert_close(got, of_product(transform, None, [axes], args), 1e-4)


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(
    levels=st.lists(st.sampled_from(LEVEL), min_size=1, max_size=3),
    method=st.sampled_from(["fold", "fold", *METHODS]),
    transform=st.sampled_from(TRANSFORMS),
)
def test_property_nested_levels(levels, method, transform):
    args = operands(levels, size=3)
    got = of_product(transform, PRODUCTS[method], levels, args)
    assert_close(got, of_product(transform, None, levels, args), 1e-4)


@pytest.mark.parametrize("levels", list(itertools.product([(0, 0), (0, None), (None, 0)], repeat=3)), ids=str)
def test_three_levels(levels):
    """Three levels of the native kernel, forward, and of the gradient of a shared operand."""
    levels3 = [(*axes, None) for axes in levels]
    w, x, _ = operands(levels3, size=2)

    def results(make):
        f = mapped(lambda w, x: make(w)(x), levels)
        return f(w, x), jax.grad(lambda w, x: (f(w, x) ** 2).sum(), (0, 1))(w, x)

    assert_close(compiled(lambda: results(NativeWave)), compiled(lambda: results(PureWave)), 1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("w_axis", "x_axis", "out_axis"), [(None, 1, 1), (None, -1, -1), (1, None, -2), (-2, -1, 0), (1, 0, 1), (-1, 1, -1)]
)
def test_every_axis(method, w_axis, x_axis, out_axis):
    def along(axis, array):
        return array[0] if axis is None else np.moveaxis(array, 0, axis)

    w, x = along(w_axis, values(2, 3)), along(x_axis, values(2, 3) + 1)
    make = with_method(Wave, method)
    got = jax.vmap(lambda w, x: make(w)(x), (w_axis, x_axis), out_axis)(w, x)
    assert_close(got, jax.vmap(lambda w, x: PureWave(w)(x), (w_axis, x_axis), out_axis)(w, x))


@pytest.mark.parametrize("method", METHODS)
def test_axis_size_alone(method):
    layer = with_method(Wave, method)(jnp.asarray(W))
    got = jax.vmap(lambda: layer(X), axis_size=4)()
    assert_close(got, np.stack([PureWave(jnp.asarray(W))(X)] * 4))


@pytest.mark.parametrize("method", METHODS)
def test_no_examples(method):
    layer = with_method(Wave, method)(jnp.asarray(W))
    x = np.zeros((0, 3), np.float32)
    assert jax.vmap(layer)(x).shape == (0, 3)
    assert jax.vmap(jax.vmap(layer), 1, 1)(np.zeros((0, 2, 3), np.float32)).shape == (0, 2, 3)
    gradient = jax.grad(lambda layer: jax.vmap(layer)(x).sum())(layer)
    np.testing.assert_array_equal(gradient.weight, np.zeros(3))


@pytest.mark.parametrize("method", METHODS)
def test_ensembles(method):
    """Ensembles of stacked layers, in which only arrays are mapped."""
    make = with_method(Wave, method)

    def results(make):
        stacked = eqx.filter_vmap(lambda w: make(w, 3))(values(4, 3))
        shared = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(eqx.if_array(0), None))
        ensemble = eqx.filter_vmap(lambda layer, x: layer(x))
        gradient = eqx.filter_grad(lambda layer: (shared(layer, X) ** 2).sum())(stacked)
        gradients = eqx.filter_vmap(eqx.filter_grad(lambda layer, x: (layer(x) ** 2).sum()))(stacked, values(4, 3))
        batches = eqx.filter_vmap(lambda layer, xs: jax.vmap(layer)(xs), in_axes=(eqx.if_array(0), None))
        return shared(stacked, X), ensemble(stacked, values(4, 3)), gradient, gradients, batches(stacked, values(5, 3))

    assert_close(results(make), results(PureWave))


def test_spmd_axis_name():
    layer = Wave(jnp.asarray(W))
    got = jax.jit(jax.vmap(layer, spmd_axis_name="d"))(values(2, 3))
    assert_close(got, jax.vmap(PureWave(jnp.asarray(W)))(values(2, 3)))


def test_collectives_of_a_mapped_axis():
    layer = Wave(jnp.asarray(W))
    f = jax.vmap(lambda x: layer(x) / jax.lax.psum(layer(x), "i"), axis_name="i")
    want = jax.vmap(PureWave(jnp.asarray(W)))(values(2, 3))
    assert_close(f(values(2, 3)), want / want.sum(0, keepdims=True))


@pytest.mark.parametrize("method", ["fold", "expand_dims"])
def test_parameters_are_not_tiled(method):
    """16 MiB, that no map touches."""

    class First(eqxc.Layer):
        weight: jax.Array
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            assert self.weight.nbytes == 2**24
            np.asarray(out)[...] = np.asarray(x) + np.asarray(self.weight).ravel()[0]

        def reference(self, x):
            return x + self.weight[0]

        def backward(self, ctx, grads, args, out, cotangents):
            assert self.weight.nbytes == 2**24
            np.copyto(np.asarray(grads[1]), np.asarray(cotangents))

    layer, x = with_method(First, method)(jnp.ones(2**22)), jnp.ones((8, 5, 3))
    for f in (
        lambda layer, x: jax.vmap(jax.vmap(layer))(x),
        lambda layer, x: jax.vmap(jax.grad(lambda x: jax.vmap(layer)(x).sum()))(x),
        lambda layer, x: jax.grad(lambda x: jax.vmap(jax.vmap(layer))(x).sum())(x),
    ):
        program = jax.jit(f).lower(layer, x).compile()
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 2**20
        assert memory.argument_size_in_bytes < 2**25
        jax.block_until_ready(program(layer, x))


class Counted(eqxc.Layer):
    """Results of several types, integers and residuals too."""

    scale: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x, n):
        (y, m), kept = out
        np.asarray(y)[...] = np.asarray(x) * np.asarray(self.scale)
        np.asarray(m)[...] = np.asarray(n) + 1
        np.asarray(kept)[...] = 5

    def reference(self, x, n):
        return x * self.scale, n + 1

    def residual_type(self, x, n):
        return jax.ShapeDtypeStruct((2, 2), jnp.float32)

    def backward(self, ctx, grads, args, out, cotangents):
        assert out[1].shape[-2:] == (2, 2)
        assert (np.asarray(out[1]) == 5).all()
        assert not np.asarray(cotangents[1]).any()
        grads[1].write(np.broadcast_to(np.asarray(cotangents[0]), out[0][0].shape) * np.asarray(self.scale))


@pytest.mark.parametrize("method", METHODS)
def test_several_results_and_residuals(method):
    layer = with_method(Counted, method)(jnp.float32(3))
    n = np.arange(4, dtype=np.int32)
    y, m = jax.vmap(layer, (0, None))(X, n[0])
    assert_close((y, m), (3 * X, np.ones(3, np.int32)))
    y, m = jax.vmap(layer, (None, 0))(X[0], n)
    assert_close((y, m), (np.full(4, 3 * X[0]), n + 1))
    gradient = jax.grad(lambda x: layer(x, n[0])[0])
    assert_close(jax.vmap(gradient)(X), np.full(3, 3, np.float32))
    assert_close(jax.grad(lambda x: jax.vmap(layer, (0, None))(x, n[0])[0].sum())(X), np.full(3, 3, np.float32))
    assert_close(jax.grad(lambda x: jax.vmap(layer, (None, 0))(x, n)[0].sum())(X[0]), np.float32(12))
