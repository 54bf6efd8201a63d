"""Derivatives of layers: of every order and mode, of arguments and parameters, by kernels and by references."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import eqxcallback as eqxc

from .layers import WAVES, PureWave, W, Wave, X, assert_close, calls, compiled, struct, values, write


def both(loss):
    return lambda f: loss(lambda w, x: (f(w, x) ** 2).sum())


def scanned(f):
    return lambda w, x: (jax.lax.scan(lambda c, _: (f(w, c), c), x, length=3)[0] ** 2).sum()


def looped(f):
    return lambda w, x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(w, c[1])), (0, x))[1]


def chosen(f):
    return lambda w, x: jax.lax.cond(x.sum() > 0, lambda w, x: f(w, x).sum(), lambda w, x: x.sum(), w, x)


POLICIES = jax.checkpoint_policies

# What is made of a function of a parameter and an argument.
DERIVATIVES: dict[str, Any] = {
    "grad of both": both(lambda f: jax.grad(f, (0, 1))),
    "grad of the parameter": both(lambda f: jax.grad(f, 0)),
    "grad of the argument": both(lambda f: jax.grad(f, 1)),
    "value and grad": both(lambda f: jax.value_and_grad(f, 1)),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (x, w)),
    "jvp of the parameter": lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (x,)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "jacrev": lambda f: jax.jacrev(f, (0, 1)),
    "hessian": both(lambda f: jax.hessian(f, (0, 1))),
    "reverse over reverse": both(lambda f: jax.jacrev(jax.jacrev(f, (0, 1)), (0, 1))),
    "reverse over forward": both(lambda f: jax.jacrev(jax.jacfwd(f, (0, 1)), (0, 1))),
    "forward over forward": both(lambda f: jax.jacfwd(jax.jacfwd(f, (0, 1)), (0, 1))),
    "mixed": both(lambda f: jax.jacfwd(jax.grad(f, 0), 1)),
    "third order": both(lambda f: jax.jacfwd(jax.hessian(f, (0, 1)), (0, 1))),
    "third order in reverse": both(lambda f: jax.jacrev(jax.jacrev(jax.grad(f), 1), (0, 1))),
    "jvp of grad": both(lambda f: lambda w, x: jax.jvp(jax.grad(f, (0, 1)), (w, x), (x, w))),
    "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](x, w),
    "vjp": lambda f: lambda w, x: jax.vjp(f, w, x)[1](w),
    "transposed": lambda f: lambda w, x: jax.linear_transpose(jax.linearize(f, w, x)[1], w, x)(w),
    "checkpoint": both(lambda f: jax.grad(jax.checkpoint(f), (0, 1))),
    "checkpoint of everything": both(lambda f: jax.grad(jax.checkpoint(f, policy=POLICIES.everything_saveable), 1)),
    "checkpoint of dots": both(lambda f: jax.grad(jax.checkpoint(f, policy=POLICIES.dots_saveable), (0, 1))),
    "hessian of checkpoint": both(lambda f: jax.hessian(jax.checkpoint(f), (0, 1))),
    "scan": lambda f: jax.grad(scanned(f), (0, 1)),
    "hessian of scan": lambda f: jax.hessian(scanned(f), (0, 1)),
    "checkpoint in scan": lambda f: jax.grad(scanned(jax.checkpoint(f)), (0, 1)),
    "while": lambda f: lambda w, x: jax.jvp(looped(f), (w, x), (x, w)),
    "cond": lambda f: jax.grad(chosen(f), (0, 1)),
    "vmap of grad": both(lambda f: lambda w, x: jax.vmap(jax.grad(f, (0, 1)), (None, 0))(w, jnp.stack([x, w, x]))),
    "vmap of hessian": both(lambda f: lambda w, x: jax.vmap(jax.hessian(f, (0, 1)), (0, None))(jnp.stack([x, w]), x)),
    "grad of vmap": lambda f: jax.grad(
        lambda w, x: (jax.vmap(f, (None, 0))(w, jnp.stack([x, w, x])) ** 2).sum(), (0, 1)
    ),
    "hessian of vmap": lambda f: jax.hessian(
        lambda w, x: (jax.vmap(f, (None, 0))(w, jnp.stack([x, w])) ** 2).sum(), (0, 1)
    ),
    "unused": lambda f: jax.grad(lambda w, x: (f(w, x) * 0, w.sum())[1], (0, 1)),
    "twice": lambda f: jax.grad(lambda w, x: (f(w, f(f(w, w), x)) ** 2).sum(), (0, 1)),
}


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


# Rules of the layer's own.


class Exponential(eqxc.Layer):
    """No reference: all derivatives come from the rule, which calls the layer itself."""

    weight: jax.Array

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


# What a backward kernel is given.


class Results(eqxc.Layer):
    """Results of several types, in a tree."""

    weight: jax.Array

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
            write(dx, dy * np.asarray(self.weight) + 2 * np.asarray(x) * dz)
        if d_self.weight is not None:
            write(d_self.weight, dy * np.asarray(x))


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

    def kernel(self, ctx, out, z):
        np.asarray(out)[...] = np.asarray(z) * np.asarray(self.weight)

    def reference(self, z):
        return z * self.weight


class ComplexWithBackward(Complex):
    """As JAX has it, cotangents are not conjugated."""

    def backward(self, ctx, grads, args, out, cotangents):
        for gradient, other in ((grads[0].weight, args[0]), (grads[1], self.weight)):
            if gradient is not None:
                write(gradient, np.asarray(cotangents) * np.asarray(other))


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
            write(dx, np.asarray(cotangents) * np.asarray(y))
        if d_self.weight is not None:
            write(d_self.weight, np.asarray(cotangents) * np.asarray(exponential) * np.float32(args[1]))


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
