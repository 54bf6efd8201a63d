"""Functions that work row by row, on XLA's threads."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import Op

from .. import one_device
from .library import kernel


F64, I64 = jnp.float64, jnp.int64


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


SOFTMAX = "x.size", "x.shape[-1]", "const double* x", "double* out"


def softmax(**more):
    function = kernel("softmax_rows", *SOFTMAX, status={3: "expected numbers >= 0"}, **more)
    return Op(
        "softmax_rows", kernels={"cpu": function}, reference=lambda x: jax.nn.softmax(x, axis=1), vmap_method="fold"
    )


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 17, 1000])
def test_all_rows_are_computed_once(rows):
    x = jnp.asarray(np.random.default_rng(rows).random((rows, 5)))
    out = softmax(rows="parallel")(x)
    np.testing.assert_allclose(out, jax.nn.softmax(x, axis=1), rtol=1e-14)


def add_one(rows):
    function = kernel(
        "add_one",
        *("out[0].shape[0]", "out[0].shape[1]", "const float* x", "const float* weight", "out[0]", "int64_t* out[1]"),
        rows=rows,
        out_type=lambda x, weight: (x, jax.ShapeDtypeStruct(x.shape[:1], I64)),
    )
    return Op("add_one", kernels={"cpu": function})


def test_what_is_not_named_is_whole():
    """For four rows two threads have two each, and both have all weights."""
    x, weight = jnp.arange(12.0, dtype=jnp.float32).reshape(4, 3), jnp.array([1, 2, 3], jnp.float32)
    out, together = add_one(("x", "out[0]", "out[1]"))(x, weight)
    np.testing.assert_array_equal(out, x + weight[None])
    assert set(together.tolist()) <= {1, 2, 3, 4}
    out, together = add_one(None)(x, weight)
    np.testing.assert_array_equal(out, x + weight[None])
    assert together.tolist() == [4] * 4


PROGRAM = """
import json, jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
from tests.c.test_rows import add_one
out, together = add_one(("x", "out[0]", "out[1]"))(jnp.ones((40, 3), jnp.float32), jnp.ones(3, jnp.float32))
print(json.dumps(together.tolist()))
"""


@pytest.mark.parametrize("threads", [1, 4])
def test_each_thread_has_a_part_of_the_rows(threads):
    environment = one_device.environment() | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    environment |= {"NPROC": str(threads)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [40 // threads] * 40


def test_an_error_of_one_row_is_that_of_the_call():
    x = jnp.ones((100, 3)).at[77, 1].set(-1.0)
    with pytest.raises(Exception, match=r"softmax_rows.*it returned 3: expected numbers >= 0"):
        softmax(rows="parallel")(x)


def test_examples_of_a_vmap_are_rows():
    op = softmax(rows="parallel")
    x = jnp.asarray(np.random.default_rng(0).random((7, 4, 5)))
    np.testing.assert_allclose(jax.vmap(op)(x), jax.nn.softmax(x, axis=2), rtol=1e-14)


def test_arrays_that_have_not_as_many_rows():
    x, weight = jnp.ones((4, 3), jnp.float32), jnp.ones(3, jnp.float32)
    with pytest.raises(ValueError, match=r"expected arrays that are divided to have as many rows; got x \(4, 3\), w"):
        add_one("parallel")(x, weight)


def test_a_weight_that_is_as_long_as_the_batch():
    """Without the axis of the examples it is not one row for each of them."""
    function = kernel("softmax_rows", *SOFTMAX, rows="parallel")
    weighted = Op("weighted", kernels={"cpu": function}, reference=lambda x, weight: x * weight, vmap_method="fold")
    x, weight = jnp.ones((3, 3)), jnp.ones(3)
    jax.block_until_ready(jax.vmap(weighted)(x, x))
    with pytest.raises(ValueError, match=r"to have as many rows; got x \(3, 3\), weight \(3,\), out \(3, 3\)"):
        jax.vmap(weighted, (0, None))(x, weight)


def test_a_result_that_is_not_divided():
    x, weight = jnp.ones((4, 3), jnp.float32), jnp.ones(3, jnp.float32)
    with pytest.raises(ValueError, match=r"expected out\[1\] to be among rows"):
        add_one(("x", "out[0]"))(x, weight)


def test_a_name_that_is_no_array():
    x, weight = jnp.ones((4, 3), jnp.float32), jnp.ones(3, jnp.float32)
    with pytest.raises(
        ValueError, match=r"expected rows to be names of arrays \(x, weight, out\[0\], out\[1\]\); got 'y'"
    ):
        add_one(("x", "y", "out[0]", "out[1]"))(x, weight)
