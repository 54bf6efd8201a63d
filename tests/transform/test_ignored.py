"""`Op.backward_ignores`: operands that a backward kernel does not read, and which are not kept for it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .test_backward import TRANSFORMS, W, X


got: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_got():
    got.clear()


def reference(w, x, *, power):
    return jnp.tanh(power * w + x)


def forward(ctx, out, w, x, *, power):
    out.write(np.tanh(power * np.asarray(w) + np.asarray(x)))


def backward(ctx, grads, args, out, cotangents, *, power):
    got.append([np.array(array) for array in args])
    dz = np.asarray(cotangents) * (1 - np.asarray(out) ** 2)
    for grad, factor in zip(grads, (power, 1), strict=True):
        if grad is not None:
            grad.write(factor * dz)


def make(*ignored, declared: Any = None):
    kernel, of_gradient = eqxc.PythonKernel(forward), eqxc.PythonKernel(backward)
    ignored = declared or ignored
    return eqxc.Op("bend", {"cpu": kernel}, reference, "fold", of_gradient, backward_ignores=ignored)


def assert_close(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transformations(transform):
    f = TRANSFORMS[transform]
    assert_close(jax.jit(f(make("w", "x")))(W, X), jax.jit(f(reference))(W, X))


def test_the_result_takes_its_place():
    out, pullback = jax.vjp(lambda w, x: make("x")(w, x, power=3), W, X)
    pullback(jnp.ones(3))
    np.testing.assert_array_equal(got, [[W, out]])


def test_the_cotangent_does_where_no_result_is_kept():
    def of_sum(ctx, grads, args, out, cotangents, power):
        got.append([np.array(array) for array in args])
        for grad, factor in zip(grads, (power, 1), strict=True):
            grad.write(factor * np.asarray(cotangents))

    op = eqxc.Op(
        "sum",
        {"cpu": eqxc.PythonKernel(lambda ctx, out, w, x, *, power: out.write(power * np.asarray(w) + np.asarray(x)))},
        lambda w, x, *, power: power * w + x,
        backward=eqxc.PythonKernel(of_sum),
        backward_reads_results=False,
        backward_ignores=("w", "x"),
    )
    cotangent = jnp.arange(3.0)
    grads = jax.vjp(lambda w, x: op(w, x, power=3), W, X)[1](cotangent)
    np.testing.assert_array_equal(got, [[cotangent, cotangent]])
    assert_close(grads, (3 * cotangent, cotangent))


def test_an_operand_of_another_type_is_kept():
    w = W[:1]
    (grad,) = jax.grad(lambda x: make("w")(w, x, power=3).sum(), (0,))(X)
    np.testing.assert_array_equal(got[0][0], w)
    assert_close(grad, jax.grad(lambda x: reference(w, x, power=3).sum())(X))


@pytest.mark.parametrize("ignored", [(), ("w",), ("w", "x")])
def test_a_program_does_not_keep_it(ignored):
    """Each operand of a chain of calls is a product that nothing else reads."""

    def chain(w, x):
        for _ in range(4):
            x = make(*ignored)(w, 2 * x, power=3)
        return x.sum()

    x = jnp.ones((256, 1024))
    memory: Any = jax.jit(jax.grad(chain, 1)).lower(x, x).compile().memory_analysis()
    kept = round(memory.temp_size_in_bytes / x.nbytes)
    assert (kept <= 6) == ("x" in ignored)


def test_a_function_of_the_gradients_that_are_wanted():
    op = make(declared=lambda wanted: ["x"] if wanted == {"x"} else [])
    out, pullback = jax.vjp(lambda x: op(W, x, power=3), X)
    pullback(jnp.ones(3))
    jax.vjp(lambda w, x: op(w, x, power=3), W, X)[1](jnp.ones(3))
    np.testing.assert_array_equal(got, [[W, out], [W, X]])


def test_results():
    """The kernel reads the second of two, which is in the place of all else."""

    def of_second(ctx, grads, args, outs, cotangents):
        got.append([np.array(array) for array in (*args, *outs)])
        grads[0].write(np.asarray(cotangents[0]) + 2 * np.asarray(outs[1]) * np.asarray(cotangents[1]))

    def both(ctx, outs, x):
        outs[0].write(np.asarray(x))
        outs[1].write(np.exp(2 * np.asarray(x)))

    op = eqxc.Op(
        "both",
        {"cpu": eqxc.PythonKernel(both)},
        lambda x: (x, jnp.exp(2 * x)),
        backward=eqxc.PythonKernel(of_second),
        backward_ignores=["x", 0],
    )
    outs, pullback = jax.vjp(op, X)
    (grad,) = pullback((X, W))
    np.testing.assert_array_equal(got, [[outs[1]] * 3])
    assert_close(grad, X + 2 * np.exp(2 * X) * W)
    wrong = dataclasses.replace(op, backward_ignores=["x", 2])
    with pytest.raises(ValueError, match=r"Op\(both\): backward_ignores has 2, which is not the number of a result"):
        wrong(X)


def test_declarations():
    with pytest.raises(TypeError, match=r"Op\(bend\): expected backward_ignores to be names of .*; got 'x'"):
        make(declared="x")
    with pytest.raises(ValueError, match=r"Op\(bend\): backward_ignores has 'y', .*; there are w, x"):
        make("y")
    with pytest.raises(ValueError, match=r"Op\(bend\): backward_ignores has -1, which is not the number of a result"):
        make(-1)
    with pytest.raises(ValueError, match=r"Op\(bend\): backward_ignores has 'y', .*; there are w, x"):
        jax.grad(lambda x: make(declared=lambda wanted: ["y"])(W, x, power=3).sum())(X)
    assert make("x") == make("x") != make("w")
    assert hash(make("x")) == hash(make("x"))
