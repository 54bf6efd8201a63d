"""Derivatives of layers: of every order and mode, of arguments and parameters, by kernels and by references."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import eqxcallback as eqxc

from .derivatives import DERIVATIVES, scanned
from .layers import WAVES, PureWave, W, Wave, X, assert_close, calls, compiled, struct, values


FIRST = (
    "grad of both",
    "jvp",
    "hessian",
    "checkpoint",
    "scan",
    "vmap of grad",
    "grad of vmap",
    "transposed",
    "linearize",
)
CASES = [(name, lane) for name in DERIVATIVES for lane in WAVES if lane == "python" or name in FIRST]


@pytest.mark.parametrize(("name", "lane"), CASES)
def test_derivatives(name, lane):
    transform = DERIVATIVES[name]
    want = compiled(transform(lambda w, x: PureWave(w)(x)), W, X)
    got = compiled(transform(lambda w, x: WAVES[lane](w)(x)), W, X)
    assert_close(got, want, 1e-4)
    assert "forward" not in calls or lane != "native"
    is_reverse = not any(
        word in name for word in ("jvp", "jacfwd", "linearize", "while", "unused", "forward over forward")
    )
    if name == "jvp of grad":
        is_reverse = True
    assert ("backward" in calls) == (is_reverse and lane != "reference")


@pytest.mark.parametrize("name", ["grad of both", "jvp", "hessian", "vmap of grad", "scan", "checkpoint", "linearize"])
def test_eager_derivatives(name):
    transform = DERIVATIVES[name]
    assert_close(transform(lambda w, x: Wave(w)(x))(W, X), transform(lambda w, x: PureWave(w)(x))(W, X), 1e-4)


def test_each_kernel_runs_once():
    w, x = jnp.asarray(W), jnp.asarray(X)
    for f in (jax.grad(lambda w, x: Wave(w)(x).sum(), (0, 1)), jax.value_and_grad(lambda w, x: Wave(w)(x).sum())):
        for g in (f, jax.jit(f)):
            calls.clear()
            jax.block_until_ready(g(w, x))
            assert calls == ["forward", "backward"]


@pytest.mark.parametrize("lane", WAVES)
def test_filtered_transformations(lane):
    layer, pure = WAVES[lane](jnp.asarray(W), 3), PureWave(jnp.asarray(W), 3)

    def loss(f, x):
        return (f(x) ** 2).sum()

    assert_close(eqx.filter_grad(loss)(layer, X), eqx.filter_grad(loss)(pure, X))
    assert_close(eqx.filter_value_and_grad(loss)(layer, X), eqx.filter_value_and_grad(loss)(pure, X))
    assert_close(eqx.filter_hessian(loss)(layer, X), eqx.filter_hessian(loss)(pure, X), 1e-4)
    assert_close(eqx.filter_jacrev(lambda f: f(X))(layer), eqx.filter_jacrev(lambda f: f(X))(pure))
    assert_close(
        eqx.filter_jvp(loss, (layer, jnp.asarray(X)), (layer, jnp.asarray(W))),
        eqx.filter_jvp(loss, (pure, jnp.asarray(X)), (pure, jnp.asarray(W))),
    )
    results = []
    for f in (layer, pure):
        value, pullback = eqx.filter_vjp(lambda f, x: f(x), f, X)
        results.append((value, pullback(jnp.ones(3))))
    assert_close(*results)
    assert_close(eqx.filter_grad(eqx.filter_checkpoint(loss))(layer, X), eqx.filter_grad(loss)(pure, X))


@pytest.mark.parametrize("make", [Wave, WAVES["reference"]])
def test_against_finite_differences(make, x64):
    w, x = values(2, 3, dtype=np.float64), 0.5 * values(2, 3, dtype=np.float64)
    check_grads(lambda w, x: make(w, 3)(x), (w, x), order=2, modes=("fwd", "rev"), rtol=1e-6, atol=1e-6)
    check_grads(lambda w, x: jax.vmap(make(w[0], 3))(x), (w, x), order=2, modes=("fwd", "rev"), rtol=1e-6, atol=1e-6)


# What each source of a derivative is for.


class Wrong(eqxc.Layer):
    """Each method is that of another function, so that a derivative tells where it is from."""

    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.asarray(out)[...] = np.asarray(x)

    def reference(self, x):
        return 10 * x * x

    def backward(self, ctx, grads, args, out, cotangents):
        np.asarray(grads[1])[...] = 100 * np.asarray(cotangents)


class WrongWithRule(Wrong):
    def jvp(self, args, tangents):
        return 1000 * args[0] * tangents[0]


class RuleAndReference(eqxc.Layer):
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.asarray(out)[...] = np.asarray(x)

    def reference(self, x):
        return 10 * x * x

    def jvp(self, args, tangents):
        return 1000 * args[0] * tangents[0]


@pytest.mark.parametrize(
    ("layer", "reverse", "forward", "second"),
    [(Wrong(), 100, 20, 20), (WrongWithRule(), 100, 1000, 1000), (RuleAndReference(), 1000, 1000, 1000)],
)
def test_where_derivatives_come_from(layer, reverse, forward, second):
    one = jnp.float32(1)
    assert layer(one) == 1
    assert jax.grad(layer)(one) == reverse
    assert jax.jvp(layer, (one,), (one,))[1] == forward
    assert jax.jacfwd(layer)(one) == forward
    assert jax.jacfwd(jax.jacfwd(layer))(one) == second
    # The derivative of what the backward kernel computes is that of the derivative that it stands for.
    assert jax.hessian(layer)(one) == second
    assert jax.grad(jax.grad(layer))(one) == second


class Square(eqxc.Layer):
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.square(x, out=np.asarray(out))

    def out_type(self, x):
        return struct(x)


class SquareWithBackward(Square):
    def backward(self, ctx, grads, args, out, cotangents):
        calls.append("backward")
        np.asarray(grads[1])[...] = 2 * np.asarray(args[0]) * np.asarray(cotangents)


def test_backward_alone():
    f = SquareWithBackward()
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(X), 2 * X)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: f(x).sum()))(X), 2 * X)
    np.testing.assert_array_equal(jax.vmap(jax.grad(f))(X), 2 * X)
    np.testing.assert_array_equal(jax.jacrev(f)(X), np.diag(2 * X))
    np.testing.assert_array_equal(jax.grad(jax.checkpoint(lambda x: f(x).sum()))(X), 2 * X)
    assert_close(jax.grad(scanned(lambda _, x: f(x)), 1)(W, X), 16 * X**15, 1e-3)
    primal, tangent = jax.jvp(lambda x: f(jax.lax.stop_gradient(x)) + x, (X,), (X,))
    np.testing.assert_array_equal(primal, X * X + X)
    np.testing.assert_array_equal(tangent, X)


REMEDIES = r"Layer (\w+\.)*{}: .*`backward`.*`reference`"


@pytest.mark.parametrize(
    ("name", "f"),
    [
        ("Square", lambda: jax.grad(lambda x: Square()(x).sum())(X)),
        ("Square", lambda: jax.jit(jax.grad(lambda x: Square()(x).sum()))(X)),
        ("Square", lambda: jax.jvp(Square(), (X,), (X,))),
        ("Square", lambda: jax.vmap(jax.grad(Square()))(X)),
        ("SquareWithBackward", lambda: jax.jvp(SquareWithBackward(), (X,), (X,))),
        ("SquareWithBackward", lambda: jax.jit(lambda x: jax.jvp(SquareWithBackward(), (x,), (x,)))(X)),
        ("SquareWithBackward", lambda: jax.linearize(SquareWithBackward(), X)[1](X)),
        ("SquareWithBackward", lambda: jax.jacfwd(SquareWithBackward())(X)),
        ("SquareWithBackward", lambda: jax.grad(jax.grad(SquareWithBackward()))(X[0])),
        ("SquareWithBackward", lambda: jax.hessian(SquareWithBackward())(X[0])),
        ("SquareWithBackward", lambda: jax.jit(jax.hessian(SquareWithBackward()))(X[0])),
    ],
)
def test_both_remedies_are_named(name, f):
    with pytest.raises(ValueError, match=REMEDIES.format(name)):
        f()
