"""Results that overwrite an argument, or an array of the layer."""

import re
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from ..transform.library import SAXPY
from .layers import W, X, assert_close, lowered, values


class InPlace(eqxc.Layer):
    """The kernel reads what it overwrites: if the two were not one, it would compute something else."""

    weight: jax.Array
    input_output_aliases: ClassVar[Any] = {"x": 0}
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        array = np.asarray(out)
        array *= np.asarray(self.weight)

    def reference(self, x):
        return x * self.weight


class AddInPlace(eqxc.Layer):
    """Native, and with its own array as the second operand."""

    input_output_aliases: ClassVar[Any] = {"x": 0}
    kernels: ClassVar[Any] = {"cpu": eqxc.NativeKernel("AddInPlace", SAXPY)}
    vmap_method = "fold"

    def reference(self, x, y):
        return x + y


class AddInPlaceOfKernel(AddInPlace):
    """The declarations of the kernel hold for it."""

    input_output_aliases: ClassVar[Any] = {}
    kernels: ClassVar[Any] = {"cpu": eqxc.NativeKernel("AddInPlace", SAXPY, aliases={"x": 0})}


def test_values():
    layer, x = InPlace(jnp.asarray(W)), jnp.asarray(X)
    for f in (layer, jax.jit(lambda x: layer(x)), jax.vmap(layer, axis_size=1, in_axes=None)):
        np.testing.assert_array_equal(jnp.reshape(f(x), (3,)), X * W)
        np.testing.assert_array_equal(x, X)  # nobody gave it away
    mine = X.copy()
    np.testing.assert_array_equal(layer(mine), X * W)
    np.testing.assert_array_equal(mine, X)


@pytest.mark.parametrize("layer", [AddInPlace(), AddInPlaceOfKernel()])
def test_native(layer):
    x, y = jnp.asarray(X), jnp.asarray(W)
    np.testing.assert_array_equal(layer(x, y), X + W)
    np.testing.assert_array_equal(jax.jit(lambda x, y: layer(x, y))(x, y), X + W)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(jax.vmap(layer)(x[None], y[None])[0], X + W)
    pointer = x.unsafe_buffer_pointer()
    got = jax.jit(layer.__call__, donate_argnums=0)(x, y)
    assert got.unsafe_buffer_pointer() == pointer


def copies(f, *args, **options):
    text = jax.jit(f, **options).lower(*args).compile().as_text()
    assert text is not None
    return len(re.findall(r"= f32\[3\]\S* copy\(", text))  # not those of loop counters


def test_donated():
    layer, x = InPlace(jnp.asarray(W)), jnp.asarray(X) + 0
    f = lambda layer, x: layer(x)
    assert copies(f, layer, x) == 1
    assert copies(f, layer, x, donate_argnums=1) == 0
    pointer = x.unsafe_buffer_pointer()
    got = jax.jit(f, donate_argnums=1)(layer, x)
    assert got.unsafe_buffer_pointer() == pointer
    assert x.is_deleted()
    np.testing.assert_array_equal(got, X * W)


def test_a_chain_has_one_buffer():
    layer, x = InPlace(jnp.asarray(W)), jnp.asarray(X) + 0
    chain = lambda layer, x: layer(layer(layer(x)))
    assert copies(chain, layer, x, donate_argnums=1) == 0
    pointer = x.unsafe_buffer_pointer()
    got = jax.jit(chain, donate_argnums=1)(layer, x)
    assert got.unsafe_buffer_pointer() == pointer
    assert_close(got, X * W**3)


def test_used_again():
    """A reader of an operand after the call gets what it was."""
    layer = InPlace(jnp.asarray(W))
    got = jax.jit(lambda x: (layer(x), x, layer(x) + layer(x + 1)))(X)
    assert_close(got, (X * W, X, X * W + (X + 1) * W))


def test_scan():
    layer = InPlace(jnp.asarray(W))
    f = lambda layer, x: jax.lax.scan(lambda c, _: (layer(c), None), x, length=5)[0]
    assert_close(jax.jit(f)(layer, X), X * W**5)
    assert copies(f, layer, jnp.asarray(X), donate_argnums=1) == 0
    scanned = jax.lax.scan(lambda c, _: (layer(c), c), jnp.asarray(X), length=3)
    assert_close(scanned, (X * W**3, np.stack([X, X * W, X * W * W])))


@pytest.mark.parametrize("method", ["fold", "sequential", "sequential_unrolled", "expand_dims", "broadcast_all"])
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_vmap(method, axes):
    """An operand that is overwritten has all axes, whether it is mapped or not."""

    class Layer(InPlace):
        vmap_method = method

    w, x = (values(3) + i if axis is None else values(2, 3) + i for i, axis in enumerate(axes))
    before = x.copy()
    got = jax.vmap(lambda w, x: Layer(w)(x), axes)(w, x)
    assert_close(got, jax.vmap(jnp.multiply, axes)(w, x))
    np.testing.assert_array_equal(x, before)
    nested = jax.vmap(jax.vmap(lambda w, x: Layer(w)(x), axes), (None, 0) if axes[1] is None else (0, None))
    args = (w, np.stack([x, x])) if axes[1] is None else (np.stack([w, w, w]), x)
    want = jax.vmap(jax.vmap(jnp.multiply, axes), (None, 0) if axes[1] is None else (0, None))(*args)
    assert_close(nested(*args), want)


def test_gradients():
    def results(f):
        loss = lambda w, x: (f(w, x) ** 2).sum()
        scanned = lambda w, x: (jax.lax.scan(lambda c, _: (f(w, c), None), x, length=3)[0] ** 2).sum()
        w, x = jnp.asarray(W), jnp.asarray(X)
        return (
            jax.grad(loss, (0, 1))(w, x),
            jax.jit(jax.grad(loss, (0, 1)))(w, x),
            jax.grad(scanned, (0, 1))(w, x),
            jax.hessian(loss, 1)(w, x),
            jax.vmap(jax.grad(loss), (None, 0))(w, jnp.stack([x, w])),
            jax.grad(jax.checkpoint(loss), (0, 1))(w, x),
        )

    assert_close(results(lambda w, x: InPlace(w)(x)), results(jnp.multiply))


# How they are named.


class Tree(eqxc.Layer):
    w: jax.Array
    k: dict[str, jax.Array]
    vmap_method = "fold"

    def kernel(self, ctx, out, x, tree, n=3, *rest, z=None, **named):
        for result, source in (
            (out["a"], x),
            (out["b"][0], tree["p"]),
            (out["b"][1], tree["q"]),
            (out["k"], self.k["c"]),
        ):
            np.asarray(result)[...] = np.asarray(source) + 1

    def reference(self, x, tree, n=3, *rest, z=None, **named):
        return {"a": x + 1, "b": (tree["p"] + 1, tree["q"] + 1), "k": self.k["c"] + 1}


def tree_layer(aliases):
    make = type("Tree", (Tree,), {"input_output_aliases": aliases, "__module__": __name__})
    return make(jnp.ones(3), {"c": jnp.ones(4), "d": jnp.ones(4)})


TREE = {"p": np.ones(2, np.float32), "q": np.ones(5, np.float32)}
X3 = np.ones(3, np.float32)


def pairs(layer, *args, **kwargs):
    text = lowered(lambda layer, args, kwargs: layer(*args, **kwargs), layer, args, kwargs)
    indices = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", text)
    names = re.findall(r"custom_call @\w+\(([^)]*)\)", text)[0].split(", ")
    # Operands in the order of the program's own arguments, without those that nobody uses: see `test_pairs`.
    return sorted((names[int(i)], int(o)) for o, i in indices)


@pytest.mark.parametrize(
    ("aliases", "want"),
    [
        # The operands: k["c"], k["d"], w are arrays of the layer, q and p come with the tree in the order of its keys.
        ({"x": "a"}, [("x", 0)]),
        ({0: 0}, [("x", 0)]),
        ({1: 1}, [("p", 1)]),
        ({2: "b", "x": 0}, None),
        ({"tree": "b"}, [("p", 1), ("q", 2)]),
        ({"tree": 1}, [("p", 1), ("q", 2)]),
        ({"self.w": "a"}, [("w", 0)]),
        ({"x": "a", "tree": "b"}, [("p", 1), ("q", 2), ("x", 0)]),
    ],
)
def test_names(aliases, want):
    layer = tree_layer(aliases)
    if want is None:
        with pytest.raises(ValueError, match="of another type"):
            layer(X3, TREE)
        return
    order = {name: f"%arg{i}" for i, name in enumerate(["w", "c", "d", "x", "p", "q"])}
    assert pairs(layer, X3, TREE) == sorted((order[name], o) for name, o in want)
    tree = jax.tree.map(jnp.asarray, TREE)
    out = jax.jit(lambda layer, x, tree: layer(x, tree))(layer, X3, tree)
    assert all((leaf == 2).all() for leaf in jax.tree.leaves(out))
    assert all((leaf == 1).all() for leaf in jax.tree.leaves((layer, tree)))


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ({"self.k": "k"}, r"self\.k\['d'\].*output past the last one"),
        ({"self.nope": "a"}, r"the input 'self\.nope', which is not a field of the layer \(self\.w, self\.k\)"),
        ({3: 0}, r"the input 3, but there are 3 flat inputs \(0: x, 1: tree\['p'\], 2: tree\['q'\]\)"),
        ({0: 3}, r"input x of type float32\[3\], output result\['k'\] of type float32\[4\]"),
        ({"x": "zz"}, r"the output 'zz', .*names: a, b, k"),
        ({"x": 9}, r"the output 9, but there are 4 flat outputs"),
        ({"x": "a", 0: 0}, r"uses the input x twice"),
        ({"x": "a", "self.w": "a"}, r"uses the output result\['a'\] twice"),
        ({"n": "a"}, r"the input 'n', which is not the name of an array"),
        ({"tree": 2}, r"input tree\['p'\] of type float32\[2\], output result\['b'\]\[1\]"),
        ({"x": 1}, r"of another type"),
    ],
)
def test_wrong_names(aliases, message):
    with pytest.raises(ValueError, match=message):
        tree_layer(aliases)(X3, TREE)


def test_an_own_array_is_not_overwritten_by_accident():
    """Flat indices are those of the call's arguments, and a parameter may have the name of a field."""

    class SameName(eqxc.Layer):
        x: jax.Array
        input_output_aliases: ClassVar[Any] = {"x": 0}
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            np.asarray(out)[...] += 1

        def reference(self, x):
            return x + 1

    class First(SameName):
        input_output_aliases: ClassVar[Any] = {0: 0}

    class Own(SameName):
        input_output_aliases: ClassVar[Any] = {"self.x": 0}

    x, value = jnp.asarray(X), jnp.full(3, 5.0)
    np.testing.assert_array_equal(SameName(value)(x), X + 1)
    np.testing.assert_array_equal(First(value)(x), X + 1)
    np.testing.assert_array_equal(Own(value)(x), np.full(3, 6))
    np.testing.assert_array_equal(value, np.full(3, 5))


def test_static_leaves_do_not_count():
    class Static(eqxc.Layer):
        spec: jax.ShapeDtypeStruct
        weight: jax.Array
        number: float
        input_output_aliases: ClassVar[Any] = {1: 0}
        vmap_method = "fold"

        def kernel(self, ctx, out, mode, x, y):
            assert self.spec == jax.ShapeDtypeStruct((3,), jnp.int8)
            np.asarray(out)[...] += np.asarray(self.weight) * self.number

        def reference(self, mode, x, y):
            return y + self.weight * self.number

    layer = Static(jax.ShapeDtypeStruct((3,), jnp.int8), jnp.asarray(W), 2.0)
    np.testing.assert_array_equal(layer(None, X, X + 1), X + 1 + 2 * W)
    np.testing.assert_array_equal(layer(jax.ShapeDtypeStruct((), jnp.int8), X, X + 1), X + 1 + 2 * W)
    np.testing.assert_array_equal(jax.jit(lambda x: layer("mode", x, x))(X), X + 2 * W)


def test_the_arrays_of_variadic_parameters():
    class Variadic(eqxc.Layer):
        input_output_aliases: ClassVar[Any] = {"xs": 0, "z": 2}
        vmap_method = "fold"

        def kernel(self, ctx, out, *xs, **named):
            for result in out:
                np.asarray(result)[...] += 1

        def reference(self, *xs, **named):
            return tuple(x + 1 for x in (*xs, named["z"]))

    x = jnp.asarray(X)
    got = jax.jit(Variadic().__call__)(x, 2 * x, a=5 * x, z=3 * x)
    assert_close(got, (X + 1, 2 * X + 1, 3 * X + 1))
    assert_close(Variadic()(X, 2 * X, z=3 * X), (X + 1, 2 * X + 1, 3 * X + 1))


class State(eqxc.Layer):
    """A cache that is really in place."""

    k: jax.Array
    input_output_aliases: ClassVar[Any] = {"self.k": "k"}
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.asarray(out["k"])[...] += np.asarray(x)
        np.asarray(out["y"])[...] = 2 * np.asarray(x)

    def reference(self, x):
        return {"k": self.k + x, "y": 2 * x}


def step(layer, x):
    out = layer(x)
    return eqx.tree_at(lambda layer: layer.k, layer, out["k"]), out["y"]


def test_own_arrays():
    layer, x = State(jnp.ones(3)), jnp.asarray(X)
    np.testing.assert_array_equal(layer(x)["k"], X + 1)
    np.testing.assert_array_equal(layer.k, np.ones(3))
    scanned, ys = jax.lax.scan(step, layer, jnp.stack([x, x, x]))
    assert_close(scanned.k, 1 + X + X + X)
    assert_close(ys, np.stack([2 * X] * 3))
    assert copies(lambda layer, xs: jax.lax.scan(step, layer, xs), layer, jnp.stack([x, x]), donate_argnums=0) == 0
    ensemble = eqx.filter_vmap(State)(jnp.ones((2, 3)))
    assert_close(eqx.filter_vmap(lambda layer: layer(X))(ensemble)["k"], np.stack([X + 1] * 2))
    assert_close(jax.vmap(layer)(jnp.stack([x, 2 * x]))["k"], np.stack([X + 1, 2 * X + 1]))
    gradient = jax.grad(lambda layer: (layer(x)["k"] ** 2).sum())(layer)
    assert_close(gradient.k, 2 * (X + 1))
    np.testing.assert_array_equal(layer.k, np.ones(3))

    donated = State(jnp.ones(3))
    pointer = donated.k.unsafe_buffer_pointer()
    got, _ = jax.jit(step, donate_argnums=0)(donated, x)
    assert got.k.unsafe_buffer_pointer() == pointer
