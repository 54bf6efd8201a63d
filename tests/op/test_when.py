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


def test_who_chooses_is_not_asked():
    chosen = make().using("native")
    assert kernels(lambda x: chosen(x, x, a=2.0), X) == 1
    assert kernels(lambda x: make().using("reference")(x, x, a=2.0), X[0]) == 0


def test_inspect_says_why():
    (kernel,), (plain,) = (eqxc.inspect(lambda x: make()(x, x, a=2.0), x).calls for x in (X[0], X))
    assert (kernel.lane, kernel.fallback) == ("native", "")
    assert (plain.lane, plain.fallback) == ("reference", "the op's `when` says no for these types")


@pytest.mark.parametrize("when", [True, "few"])
def test_wrong_declarations(when):
    with pytest.raises(TypeError, match="expected when to be a function, and a reference beside it"):
        make(when=when)


def test_it_needs_a_reference():
    kernel = eqxc.NativeKernel("Saxpy", SAXPY, out_type=lambda x, y, *, a: x)
    with pytest.raises(TypeError, match="expected when to be a function, and a reference beside it"):
        eqxc.Op("saxpy", {"cpu": kernel}, when=few)
