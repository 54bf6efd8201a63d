"""`vmap_method="threads"`: kernels that rely on XLA's alignment, for examples that begin anywhere."""

import dataclasses
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import CKernel, NativeKernel, Op

from .library import build


_FOLDER = tempfile.TemporaryDirectory(prefix="eqxcallback-aligned-")
LIBRARY = pathlib.Path(_FOLDER.name, "libaligned.so")
C = CKernel("twice", LIBRARY, ("x.size", "x", "out"), status={7: "expected memory of XLA's alignment"})
KERNELS = {"c": C, "native": NativeKernel("Twice", LIBRARY), "asynchronous": NativeKernel("TwiceLater", LIBRARY)}


@pytest.fixture(autouse=True, scope="module")
def library():
    build(LIBRARY, "aligned.cc")


def op(kind, **more):
    kernel = dataclasses.replace(KERNELS[kind], **more)
    return Op(kind, kernels={"cpu": kernel}, reference=lambda x: 2 * x, vmap_method="threads")


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("size", [1, 9, 16, 17])
def test_kernels_may_rely_on_it(kind, size):
    x = jnp.arange(100.0 * size).reshape(100, size)
    np.testing.assert_array_equal(jax.vmap(op(kind))(x), 2 * x)


@pytest.mark.parametrize("kind", KERNELS)
def test_a_result_in_the_place_of_an_operand(kind):
    in_place = op(kind, aliases={"x": 0})
    x = jnp.arange(63.0).reshape(7, 9)
    np.testing.assert_array_equal(jax.jit(jax.vmap(in_place))(x), 2 * x)
    inner = jax.jit(lambda x: jax.vmap(in_place)(x + 1))  # memory of the program's own
    np.testing.assert_array_equal(inner(x), 2 * x + 2)


def test_what_examples_share_is_not_copied():
    function = CKernel("add_first", LIBRARY, ("x.size", "x", "w", "out"), status={7: "expected XLA's alignment"})
    add = Op("add", kernels={"cpu": function}, reference=lambda x, w: x + w[0], vmap_method="threads")
    x = jnp.arange(63.0).reshape(7, 9)
    np.testing.assert_array_equal(jax.vmap(add, (0, None))(x, jnp.full(3, 5.0)), x + 5)


@pytest.mark.parametrize("side", ["before", "after"])
def test_an_example_that_writes_beside_its_result(side):
    """Into the results of its neighbours, it would be."""
    function = CKernel(f"write_{side}", LIBRARY, ("x.size", "x", "out"))
    beside = Op("beside", kernels={"cpu": function}, reference=lambda x: 2 * x, vmap_method="threads")
    x = jnp.ones((3, 5))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"example 0 of 3: .*before or beyond the memory of result 0"):
        jax.block_until_ready(jax.jit(jax.vmap(beside))(x))


def test_checked_mode():
    x = jnp.arange(63.0).reshape(7, 9)
    with eqxc.debug.checked():
        np.testing.assert_array_equal(jax.jit(jax.vmap(op("c")))(x), 2 * x)
