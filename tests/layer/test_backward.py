"""The arguments of a backward kernel, and what it may leave out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .derivatives import DERIVATIVES
from .layers import W, Wave, X, assert_close, calls, compiled, struct


class Results(eqxc.Layer):
    """Results of several types, in a tree."""

    weight: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x, n, option):
        np.asarray(out["y"])[...] = np.asarray(x) * np.asarray(self.weight)
        np.asarray(out["n"])[...] = np.asarray(n) + 1
        np.asarray(out["positive"])[...] = np.asarray(x) > 0
        np.asarray(out["z"][0])[...] = np.asarray(x) ** 2

    def reference(self, x, n, option):
        return {"y": x * self.weight, "n": n + 1, "positive": x > 0, "z": (x**2, None, "text")}


class ResultsWithBackward(Results):
    def backward(self, ctx, grads, args, out, cotangents):
        calls.append("backward")
        d_self, dx, dn, d_option = grads
        x, n, option = args
        assert type(d_self) is ResultsWithBackward
        assert (dn, d_option, option) == (None, None, "an option")
        assert out["z"][1:] == cotangents["z"][1:] == (None, "text")
        assert out["n"].dtype == cotangents["n"].dtype == n.dtype == np.int32
        assert not np.asarray(cotangents["n"]).any()
        assert not np.asarray(cotangents["positive"]).any()
        assert (np.asarray(out["n"]) == np.asarray(n) + 1).all()
        dy, dz = np.asarray(cotangents["y"]), np.asarray(cotangents["z"][0])
        if dx is not None:
            dx.write(dy * np.asarray(self.weight) + 2 * np.asarray(x) * dz)
        if d_self.weight is not None:
            grads[0].weight.write(dy * np.asarray(x))


N = np.arange(3, dtype=np.int32)


@pytest.mark.parametrize("key", ["y", "z"])
def test_several_results(key):
    def gradients(make, vmap=False):
        def loss(w, x):
            def one(x):
                out = make(w)(x, N, "an option")
                return out["y"] if key == "y" else out["z"][0] * 3

            return (jax.vmap(one)(jnp.stack([x, w])) if vmap else one(x)).sum()

        return jax.grad(loss, (0, 1))(W, X), jax.grad(loss, 0)(W, X), jax.grad(loss, 1)(W, X)

    assert_close(gradients(ResultsWithBackward), gradients(Results))
    assert_close(gradients(ResultsWithBackward, vmap=True), gradients(Results, vmap=True))
    assert calls


@pytest.mark.parametrize("make", [Results, ResultsWithBackward])
def test_integers(make):
    def f(x, n):
        out = make(jnp.asarray(W))(x, n, "an option")
        return {k: out[k] for k in ("y", "n", "positive")}

    float0 = np.zeros(3, jax.dtypes.float0)
    primals, tangents = jax.jvp(f, (X, N), (W, float0))
    assert (tangents["n"].dtype, tangents["positive"].dtype) == (jax.dtypes.float0, jax.dtypes.float0)
    np.testing.assert_array_equal(tangents["y"], W * W)
    np.testing.assert_array_equal(primals["n"], N + 1)
    dx, dn = jax.grad(lambda x, n: f(x, n)["y"].sum(), (0, 1), allow_int=True)(X, N)
    np.testing.assert_array_equal(dx, W)
    assert dn.dtype == jax.dtypes.float0
    calls.clear()
    dx, dn = jax.vjp(lambda x, n: f(x, n)["n"], X, N)[1](float0)
    np.testing.assert_array_equal(dx, np.zeros(3))
    assert calls == []  # nothing to do
    bools = np.array([True, False, True])
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.where(bools, f(x, N)["y"], 0).sum())(X), W * bools)


def test_zero_cotangents_run_no_kernel():
    layer = Wave(jnp.asarray(W))
    pullback = jax.vjp(lambda x: (layer(x), x), X)[1]
    calls.clear()
    np.testing.assert_array_equal(jax.jit(lambda x: jax.grad(lambda x: (layer(x), x.sum())[1])(x))(X), np.ones(3))
    assert calls == []
    np.testing.assert_array_equal(pullback((jnp.zeros(3), jnp.ones(3)))[0], np.ones(3))


class Complex(eqxc.Layer):
    weight: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, z):
        np.asarray(out)[...] = np.asarray(z) * np.asarray(self.weight)

    def reference(self, z):
        return z * self.weight


class ComplexWithBackward(Complex):
    """As JAX has it, cotangents are not conjugated."""

    def backward(self, ctx, grads, args, out, cotangents):
        for gradient, other in ((grads[0].weight, args[0]), (grads[1], self.weight)):
            if gradient is not None:
                gradient.write(np.asarray(cotangents) * np.asarray(other))


@pytest.mark.parametrize("make", [Complex, ComplexWithBackward])
def test_complex(make):
    w, z = np.array([1 + 2j, 3 - 1j], np.complex64), np.array([2j, 1 - 1j], np.complex64)

    def loss(f):
        return lambda w, z: (jnp.abs(f(w, z)) ** 2).sum()

    for transform in (
        lambda f: jax.grad(loss(f), (0, 1))(w, z),
        lambda f: jax.jvp(f, (w, z), (z, w)),
        lambda f: jax.vjp(f, w, z)[1](w),
        lambda f: jax.jacrev(f, holomorphic=True)(w, z),
        lambda f: jax.grad(lambda w, z: loss(jax.vmap(f, (None, 0)))(w, jnp.stack([z, w])), (0, 1))(w, z),
    ):
        assert_close(transform(lambda w, z: make(w)(z)), transform(lambda w, z: z * w))


# Residuals.


class WithResiduals(eqxc.Layer):
    weight: jax.Array
    key: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x, scale=1.0):
        y, (exponential, rest) = out
        np.exp(x, out=np.asarray(exponential))
        np.asarray(rest["seven"])[...] = 7
        np.copyto(np.asarray(rest["key"]), np.asarray(self.key))
        np.asarray(y)[...] = np.asarray(exponential) * np.asarray(self.weight) * np.float32(scale)

    def reference(self, x, scale=1.0):
        return jnp.exp(x) * self.weight * scale

    def residual_type(self, x, scale):
        return struct(x), {"seven": jax.ShapeDtypeStruct((), jnp.int32), "key": struct(self.key), "static": "s"}

    def backward(self, ctx, grads, args, out, cotangents):
        calls.append("backward")
        d_self, dx, d_scale = grads
        y, (exponential, rest) = out
        assert (d_scale, args[1], rest["static"], d_self.key) == (None, 2.0, "s", None)
        assert (np.asarray(rest["seven"]) == 7).all()
        assert (np.asarray(rest["key"]) == np.asarray(self.key)).all()
        if dx is not None:
            dx.write(np.asarray(cotangents) * np.asarray(y))
        if d_self.weight is not None:
            d_self.weight.write(np.asarray(cotangents) * np.asarray(exponential) * np.float32(args[1]))


@pytest.mark.parametrize(
    "name",
    [
        *("grad of both", "grad of the parameter", "jvp", "hessian", "checkpoint", "scan"),
        *("vmap of grad", "grad of vmap", "vmap of hessian", "linearize"),
    ],
)
@pytest.mark.parametrize("method", ["fold", "sequential", "broadcast_all"])
def test_residuals(name, method):
    class Layer(WithResiduals):
        vmap_method = method

    transform, key = DERIVATIVES[name], jax.random.key(3)
    got = compiled(transform(lambda w, x: Layer(w, key)(x, 2.0)), W, X)
    assert_close(got, compiled(transform(lambda w, x: jnp.exp(x) * w * 2), W, X), 1e-4)
    assert ("backward" in calls) == (name not in ("jvp", "linearize"))


def test_residuals_where_there_is_no_kernel():
    layer = WithResiduals(jnp.asarray(W), jax.random.key(3))
    f = jax.jit(jax.grad(lambda x: layer(x, 2.0).sum()))
    text = f.trace(X).lower(lowering_platforms=("tpu",)).as_text()
    assert "custom_call" not in text
    assert "exponential" in text


def test_residuals_are_not_seen_by_callers():
    layer = WithResiduals(jnp.asarray(W), jax.random.key(3))
    assert_close(layer(X, 2.0), np.exp(X) * W * 2)
    assert_close(jax.vmap(lambda x: layer(x, 2.0))(X[None])[0], np.exp(X) * W * 2)
    assert jax.eval_shape(lambda x: layer(x, 2.0), X) == struct(X)
