"""`when`: kernels that run for some types of operands only."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .library import SAXPY


X, Y = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones(4, np.float32)


def few(x, y, *, a):
    assert isinstance(x, jax.ShapeDtypeStruct)
    assert isinstance(y, jax.ShapeDtypeStruct)
    return math.prod(x.shape) <= 4 and a > 0


def reference(x, y, *, a):
    return a * x + y


def make(**options):
    options = {"batching": {"x": "batched", "y": "batched"}, "when": few, **options}
    return eqxc.Op("saxpy", {"cpu": eqxc.NativeKernel("Saxpy", SAXPY)}, reference, **options)


def kernels(f, *args):
    return jax.jit(f).lower(*args).as_text().count("custom_call @eqxcallback_Saxpy_")


def test_types_decide():
    op = make()
    assert kernels(lambda x, y: op(x, y, a=2.0), X[0], Y) == 1
    assert kernels(lambda x, y: op(x, y, a=2.0), X, X) == 0
    np.testing.assert_array_equal(op(X, X, a=2.0), 3 * X)


def test_options_decide():
    assert kernels(lambda x, y: make()(x, y, a=-2.0), X[0], Y) == 0


@pytest.mark.parametrize("batching", ["fold", {"x": "batched", "y": "batched"}], ids=["fold", "modes"])
def test_axes_of_vmap_count(batching):
    op = make(batching=batching)
    mapped = jax.vmap(lambda x, y: op(x, y, a=2.0), (0, None))
    assert kernels(mapped, X, Y) == 0
    assert kernels(mapped, X[:1], Y) == 1
    np.testing.assert_array_equal(mapped(X, Y), 2 * X + Y)


def test_each_example_counts_alone():
    """`sequential` calls the kernel for each of them."""
    op = make(batching="sequential")
    assert kernels(jax.vmap(lambda x, y: op(x, y, a=2.0), (0, None)), X, Y) == 1


def test_derivatives_are_those_of_the_reference():
    for x in (X[0], X):
        got = jax.grad(lambda x: make()(x, jnp.ones(x.shape), a=2.0).sum())(x)
        np.testing.assert_array_equal(got, np.full(x.shape, 2.0))


def forward(ctx, out, x):
    np.asarray(out)[...] = np.asarray(x) ** 2


def backward(ctx, grads, args, out, cotangent):
    np.asarray(grads[0])[...] = 2000 * np.asarray(args[0]) * np.asarray(cotangent)


# Its gradient is wrong by a factor that says where it comes from.
SQUARE = eqxc.Op(
    "square",
    {"cpu": eqxc.PythonKernel(forward)},
    lambda x: x**2,
    batching="fold",
    backward=eqxc.PythonKernel(backward),
    when=lambda x: math.prod(x.shape) <= 4,
)


def total(x):
    return SQUARE(x).sum()


@pytest.mark.parametrize(
    ("gradient", "factor"),
    [
        (lambda x: jax.grad(total)(x[0]), 1000),
        (lambda x: jax.grad(total)(x.ravel()), 1),
        (lambda x: jax.vmap(jax.grad(total))(x), 1),
        (lambda x: jax.vmap(jax.grad(total))(x[:1]), 1000),
        (lambda x: jax.grad(lambda x: jax.vmap(total)(x).sum())(x), 1),
        (lambda x: jax.vmap(lambda x: jax.grad(lambda x: jax.vmap(total)(x).sum())(x))(x[:, :, None]), 1),
        # The cotangents alone are mapped: the call was one of few.
        (lambda x: jax.jacrev(SQUARE)(x[0]).sum(0), 1000),
        (lambda x: jax.vmap(jax.jacrev(SQUARE))(x).sum(1), 1),
    ],
    ids=["few", "many", "vmap", "vmap of few", "inside", "both", "jacrev", "vmap of jacrev"],
)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_backward_kernel_runs_where_the_forward_one_did(gradient, factor, transform):
    got = transform(gradient)(X)
    want = 2 * X.ravel()[: got.size].reshape(got.shape)
    np.testing.assert_array_equal(got, factor * want)


def test_who_chooses_is_not_asked():
    chosen = make().using("native")
    assert kernels(lambda x: chosen(x, x, a=2.0), X) == 1
    assert kernels(lambda x: make().using("reference")(x, x, a=2.0), X[0]) == 0


def test_inspect_says_why():
    for f in (SQUARE, jax.grad(total)):
        few, many = (eqxc.inspect(f, x).calls for x in (X[0], X.ravel()))
        assert [(call.lane, call.fallback) for call in few] == [("python", "")] * len(few)
        assert [(call.lane, call.fallback) for call in many] == [
            ("reference", "the op's `when` says no for these types")
        ] * len(many)


@pytest.mark.parametrize("when", [True, "few"])
def test_wrong_declarations(when):
    with pytest.raises(TypeError, match="expected when to be a function, and a reference beside it"):
        make(when=when)


def test_it_needs_a_reference():
    kernel = eqxc.NativeKernel("Saxpy", SAXPY, out_type=lambda x, y, *, a: x)
    with pytest.raises(TypeError, match="expected when to be a function, and a reference beside it"):
        eqxc.Op("saxpy", {"cpu": kernel}, when=few)
