"""Derivatives by a layer's own rule, `jvp`."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .derivatives import DERIVATIVES
from .layers import W, X, assert_close, calls, compiled, struct


class Exponential(eqxc.Layer):
    """No reference: all derivatives come from the rule, which calls the layer itself."""

    weight: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        calls.append("forward")
        np.asarray(out)[...] = np.exp(np.asarray(x)) * np.asarray(self.weight)

    def out_type(self, x):
        return struct(x)

    def jvp(self, args, tangents):
        (x,), (dx,) = args, tangents
        assert args.self.weight is self.weight
        return self(x) * dx + jnp.exp(x) * tangents.self.weight


class ExponentialWithPrimal(Exponential):
    def jvp(self, args, tangents):
        return self(*args), Exponential.jvp(self, args, tangents)


def exponential(w, x):
    return jnp.exp(x) * w


@pytest.mark.parametrize("make", [Exponential, ExponentialWithPrimal])
@pytest.mark.parametrize(
    "name",
    [
        *("grad of both", "grad of the argument", "jvp", "jacfwd", "jacrev", "hessian", "third order", "checkpoint"),
        *("scan", "vmap of grad", "vmap of hessian", "grad of vmap", "hessian of vmap", "linearize"),
    ],
)
def test_own_rule(name, make):
    transform = DERIVATIVES[name]
    got = compiled(transform(lambda w, x: make(w)(x)), W, X)
    assert_close(got, compiled(transform(exponential), W, X), 1e-4)
    if name in ("grad of both", "hessian", "vmap of grad"):
        assert_close(transform(lambda w, x: make(w)(x))(W, X), transform(exponential)(W, X), 1e-4)


class DifferentiatesItsReference(Exponential):
    def reference(self, x):
        return jnp.exp(x) * self.weight

    def jvp(self, args, tangents):
        return jax.jvp(lambda layer, *args: layer.reference(*args), (self, *args), (tangents.self, *tangents))


class OfTheArgumentAlone(DifferentiatesItsReference):
    def jvp(self, args, tangents):
        return jax.jvp(self.reference, args, tangents)


def test_rules_may_use_jax_jvp():
    for name in ("grad of both", "hessian", "jvp"):
        transform = DERIVATIVES[name]
        got = transform(lambda w, x: DifferentiatesItsReference(w)(x))(W, X)
        assert_close(got, transform(exponential)(W, X), 1e-4)
    assert_close(jax.grad(lambda x: OfTheArgumentAlone(jnp.asarray(W))(x).sum())(X), np.exp(X) * W)


def test_a_rule_that_ignores_the_layer():
    with pytest.raises(ValueError, match=r"OfTheArgumentAlone: .* jvp does not use their tangents.*`tangents\.self`"):
        jax.grad(lambda w: OfTheArgumentAlone(w)(X).sum())(W)


class SeveralResults(eqxc.Layer):
    result: Any = eqx.field(static=True)
    vmap_method = "fold"

    def kernel(self, ctx, out, x, n, mode="m"):
        np.asarray(out["y"])[...] = 2 * np.asarray(x)
        np.asarray(out["n"])[...] = np.asarray(n) + 1

    def reference(self, x, n, mode="m"):
        return {"y": 2 * x, "n": n + 1, "none": None, "text": "t"}

    def jvp(self, args, tangents):
        assert args[2] == mode_of(args)
        assert tangents[1].dtype == jax.dtypes.float0  # of integers, as `jax.jvp` takes them
        assert tangents[2] is None  # of what is static
        return self.result(tangents[0])


def mode_of(args):
    return "m"


@pytest.mark.parametrize(
    "result",
    [
        lambda dx: {"y": 2 * dx, "n": None, "none": None, "text": None},
        lambda dx: {"y": 2 * dx, "n": np.zeros(3, jax.dtypes.float0), "none": None, "text": "t"},
        lambda dx: ({"anything": 1}, {"y": 2 * dx, "n": 0, "none": None, "text": 3.0}),
    ],
)
def test_trees_that_a_rule_may_return(result):
    layer, n = SeveralResults(result), np.arange(3, dtype=np.int32)
    _, tangents = jax.jvp(lambda x: {k: v for k, v in layer(x, n).items() if k in "yn"}, (X,), (W,))
    np.testing.assert_array_equal(tangents["y"], 2 * W)
    assert tangents["n"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(jax.grad(lambda x: layer(x, n)["y"].sum())(X), np.full(3, 2))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda dx: dx, r"SeveralResults\.jvp: expected tangents in the tree of the results"),
        (
            lambda dx: {"y": dx[:2], "n": None, "none": None, "text": None},
            r"expected a tangent of type float32\[3\]; got",
        ),
        (lambda dx: {"y": dx.astype(jnp.float16), "n": None, "none": None, "text": None}, r"got float16\[3\]"),
        (lambda dx: {"y": 2.0, "n": None, "none": None, "text": None}, r"float32\[3\]; got float32\[\]"),
    ],
)
def test_a_wrong_result_of_a_rule(result, message):
    layer, n = SeveralResults(result), np.arange(3, dtype=np.int32)
    for f in (jax.grad(lambda x: layer(x, n)["y"].sum()), jax.jit(jax.grad(lambda x: layer(x, n)["y"].sum()))):
        with pytest.raises(ValueError, match=message):
            f(X)


def test_a_number_as_a_tangent():
    class Three(eqxc.Layer):
        result: Any = eqx.field(static=True)
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = 3 * np.asarray(x)

        def out_type(self, x):
            return struct(x)

        def jvp(self, args, tangents):
            return self.result

    one = jnp.float32(1)
    assert jax.jvp(Three(3.0), (one,), (one,))[1] == 3
    assert jax.jvp(Three(None), (one,), (one,))[1] == 0


def test_keyword_arguments_are_in_the_order_of_the_signature():
    class Weighted(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x, *, z, b, a):
            np.asarray(out)[...] = np.asarray(x) + 10 * np.asarray(z) + 100 * np.asarray(b) + 1000 * np.asarray(a)

        def reference(self, x, *, z, b, a):
            return x + 10 * z + 100 * b + 1000 * a

    class WithRule(Weighted):
        def jvp(self, args, tangents):
            np.testing.assert_array_equal(args[3], X)
            return sum(10**i * dx for i, dx in enumerate(tangents))

    class WithBackward(Weighted):
        def backward(self, ctx, grads, args, out, cotangents):
            np.testing.assert_array_equal(np.asarray(args[3]), X)
            for i, dx in enumerate(grads[1:]):
                np.asarray(dx)[...] = 10**i * np.asarray(cotangents)

    for layer in (Weighted(), WithRule(), WithBackward()):
        gradients = jax.grad(lambda x, z, b, a, layer=layer: layer(x, a=a, b=b, z=z).sum(), (0, 1, 2, 3))(W, W, W, X)
        np.testing.assert_array_equal(gradients, [[10**i] * 3 for i in range(4)])
