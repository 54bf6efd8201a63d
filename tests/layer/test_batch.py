"""`vmap` by a layer's own rule, `batch`."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .layers import Identity, W, X, assert_close, struct, values


rules: list[Any] = []


class OwnRule(eqxc.Layer):
    """Its rule returns something else, so that one sees when it is used."""

    weight: jax.Array
    result: Any = eqx.field(static=True, default=None)
    vmap_method = "fold"

    def kernel(self, ctx, out, x, y, mode="m"):
        rules.append("kernel")
        assert out["static"] == 3
        out["a"].write(np.asarray(x) * np.asarray(y) * np.asarray(self.weight))
        out["b"][0].write(np.asarray(out["a"]) + np.float32(1))

    def reference(self, x, y, mode="m"):
        product = x * y * self.weight
        return {"a": product, "b": (product + 1, None), "static": 3}

    def batch(self, axis_size, in_axes, args):
        x, y, mode = args
        rules.append((axis_size, tuple(in_axes), mode))
        if self.result is not None:
            return self.result(x, y)
        a = 100 * x * y * self.weight if x.shape == y.shape else 100 * x * y[None] * self.weight[None]
        return {"a": a, "b": (a + 1, None), "static": 3}, 0


@pytest.fixture(autouse=True)
def no_rules():
    rules.clear()


def arrays_of(out):
    assert out["static"] == 3
    assert out["b"][1] is None
    return {"a": out["a"], "b": out["b"][0]}


def test_own_rule():
    layer = OwnRule(jnp.asarray(W))
    x = values(2, 3)
    got = jax.vmap(lambda x, y: arrays_of(layer(x, y)), (0, None))(x, X)
    assert_close(got, {"a": 100 * x * X * W, "b": 100 * x * X * W + 1})
    assert rules == [(2, (0, None, None), "m")]
    rules.clear()
    jax.vmap(lambda x: arrays_of(layer(x, X, "other")), 1)(x.T)
    assert rules == [(2, (0, None, None), "other")]
    assert_close(arrays_of(layer(X, X))["a"], X * X * W)


@pytest.mark.parametrize(
    "axes",
    [
        0,
        True,
        {"a": 0, "b": 0, "static": None},
        {"a": True, "b": (True, None), "static": False},
        {"a": 0, "b": (0, None), "static": None},
    ],
    ids=str,
)
def test_axes_that_a_rule_may_return(axes):
    layer = OwnRule(jnp.asarray(W), lambda x, y: ({"a": x, "b": (x + 1, None), "static": 3}, axes))
    x = values(2, 3)
    assert_close(jax.vmap(lambda x: arrays_of(layer(x, X)))(x), {"a": x, "b": x + 1})


def test_unmapped_and_transposed_results_of_a_rule():
    x = values(2, 3)
    axes: Any
    for axes in ({"a": None, "b": (-1, None), "static": None}, {"a": False, "b": 1, "static": 0}):
        rule = lambda x, y, axes=axes: ({"a": y, "b": (x.T, None), "static": 3}, axes)
        layer = OwnRule(jnp.asarray(W), rule)
        got = jax.vmap(lambda x, layer=layer: arrays_of(layer(x, X)))(x)
        assert_close(got, {"a": np.stack([X, X]), "b": x})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x, y: ({"a": x, "b": (x, None), "static": 3}, {"a": 0}), r"batch: expected out_axes to be a prefix"),
        (lambda x, y: ({"a": x, "b": (x[0], None), "static": 3}, 0), r"OwnRule\.batch: expected .*\[2,3\]; got"),
        (
            lambda x, y: ({"a": x, "b": (x.astype(jnp.int32), None), "static": 3}, 0),
            r"got float32\[2,3\], int32\[2,3\]",
        ),
        (lambda x, y: ({"a": x, "b": (), "static": 3}, 0), r"OwnRule\.batch: expected"),
        (lambda x, y: ({"a": x, "b": (x, None), "static": 3}, None), r"expected float32\[3\]"),
        (
            lambda x, y: ({"a": x, "c": (x, None), "static": 3}, 0),
            r"OwnRule\.batch: expected results in the tree .*'b'.*'c'",
        ),
        (lambda x, y: ({"b": (x, None), "static": 3}, 0), r"OwnRule\.batch: expected results in the tree"),
        (lambda x, y: 3, r"OwnRule\.batch: expected \(out, out_axes\) to be returned; got 3"),
    ],
)
def test_a_wrong_result_of_a_rule(result, message):
    layer = OwnRule(jnp.asarray(W), result)
    with pytest.raises((TypeError, ValueError), match=message):
        jax.vmap(lambda x: arrays_of(layer(x, X)))(values(2, 3))


def test_where_parameters_are_mapped_the_method_holds():
    got = jax.vmap(lambda w, x: arrays_of(OwnRule(w)(x, X))["a"])(values(2, 3), values(2, 3))
    assert_close(got, values(2, 3) ** 2 * X)
    assert rules == ["kernel"]


def test_nested_maps_of_a_rule():
    """The outer one maps what the rule of the inner one returns: a rule that calls the layer is asked again."""

    class Recursive(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            rules.append(("kernel", x.shape))
            np.square(x, out=np.asarray(out))

        def reference(self, x):
            return x * x

        def batch(self, axis_size, in_axes, args):
            rules.append(("rule", args[0].shape))
            return self(args[0]), True

    x = values(2, 5, 3)
    assert_close(jax.vmap(jax.vmap(Recursive()))(x), x * x)
    assert rules == [("rule", (5, 3)), ("rule", (2, 5, 3)), ("kernel", (2, 5, 3))]
    assert_close(jax.vmap(jax.grad(lambda x: Recursive()(x).sum()))(x[0]), 2 * x[0])
    assert_close(jax.grad(lambda x: jax.vmap(Recursive())(x).sum())(x), 2 * x)
    assert_close(jax.hessian(lambda x: jax.vmap(Recursive())(x).sum())(x[0, 0]), 2 * np.eye(3, dtype=np.float32))
    assert_close(jax.jit(jax.vmap(Recursive(), 2, 2))(x), x * x)


def test_a_rule_of_keyword_arguments():
    class Keywords(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x, *, z, a):
            out.write(np.asarray(x) + 10 * np.asarray(z) + 100 * np.asarray(a))

        def reference(self, x, *, z, a):
            return x + 10 * z + 100 * a

        def batch(self, axis_size, in_axes, args):
            x, z, a = args
            assert tuple(in_axes) == (0, None, 0)
            return x + 10 * z[None] + 100 * a, 0

    x = values(2, 3)
    got = jax.vmap(lambda x, a: Keywords()(x, a=a, z=X))(x, x)
    assert_close(got, x + 10 * X + 100 * x)


def test_a_rule_with_residuals_and_effects():
    """A rule knows nothing of residuals: there the method holds."""

    class Kept(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            rules.append("kernel")
            out[0].write(2 * np.asarray(x))
            out[1].write(np.asarray(x))

        def reference(self, x):
            return 2 * x

        def residual_type(self, x):
            return struct(x)

        def backward(self, ctx, grads, args, out, cotangents):
            rules.append("backward")
            assert (np.asarray(out[1]) == np.asarray(args[0])).all()
            np.asarray(grads[1])[...] = 2 * np.asarray(cotangents)

        def batch(self, axis_size, in_axes, args):
            return 2 * args[0], 0

    x = values(2, 3)
    assert_close(jax.vmap(Kept())(x), 2 * x)
    assert_close(jax.vmap(jax.grad(lambda x: Kept()(x).sum()))(x), np.full((2, 3), 2, np.float32))
    assert rules == ["kernel", "kernel", "backward"]


def test_typed_keys_in_a_rule():
    class WithKey(Identity):
        def batch(self, axis_size, in_axes, args):
            assert jnp.issubdtype(args[0].dtype, jax.dtypes.prng_key)
            return args[0][::-1], 0

    keys = jax.random.split(jax.random.key(0), 2)
    assert (jax.vmap(WithKey())(keys) == keys[::-1]).all()
