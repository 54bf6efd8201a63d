"""Python functions that Numba compiles, as kernels."""

import dataclasses
import json
import re
import subprocess
import sys
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import NumbaKernel, Op
from eqxcallback.backends import _numba

from .. import one_device
from .library import saxpy_reference


# Numba takes its time to compile: once is enough.
pytestmark = pytest.mark.any_jax_version

numba: Any = pytest.importorskip("numba", reason="Numba is not installed")


def saxpy(out, x, y, a):
    for i in range(out.size):
        out.flat[i] = a * x.flat[i] + y.flat[i]


def saxpy_backward(dx, dy, x, y, out, dout, a):
    """A gradient that is smaller is of an operand that all examples share."""
    if dx is not None:
        dx[...] = 0
        for i in range(dout.size):
            dx.flat[i % dx.size] += a * dout.flat[i]
    if dy is not None:
        dy[...] = 0
        for i in range(dout.size):
            dy.flat[i % dy.size] += dout.flat[i]


def op(**more):
    kernels = {"cpu": NumbaKernel(saxpy)}
    return Op("saxpy", kernels=kernels, reference=saxpy_reference, vmap_method="broadcast_all", **more)


def test_gradients_by_numba():
    """All else that is asked of a kernel: tests/layer/test_kinds.py."""
    with_backward = op(backward={"cpu": NumbaKernel(saxpy_backward)})
    rows = ("reference", "grad", "partial grads", "grad of vmap")
    assert eqxc.testing.check(with_backward, jnp.arange(6.0), jnp.ones(6), a=2.0, only=rows).passed


def test_it_runs_without_python():
    (call,) = eqxc.inspect(lambda x: op()(x, x, a=0.5), jnp.ones(3)).calls
    assert (call.lane, call.fallback) == ("native", "")
    assert eqxc.available_backends()["numba"] is True


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 1, 3, 2)], ids=str)
def test_any_rank(shape):
    check_copy(np.ones(shape, np.float32))


@pytest.mark.parametrize("dtype", ["float64", "int16", "uint8", "complex64", "bool"])
def test_any_dtype(dtype, x64):
    check_copy(np.ones(3, dtype))


def check_copy(x):
    copy = Op("copy", kernels={"cpu": NumbaKernel(copied)}, reference=lambda x: x)
    np.testing.assert_array_equal(copy(x), x)


def copied(out, x):
    out[...] = x


def test_numbers_of_each_type():
    def numbers(out, x, flag, count, factor):
        out[0] = (x[0] + count) * factor if flag else 0

    kernel = NumbaKernel(numbers)
    function = Op("numbers", kernels={"cpu": kernel}, reference=lambda x, *, flag, count, factor: (x + count) * factor)
    assert function(jnp.ones(1), flag=True, count=3, factor=0.5).tolist() == [2]
    assert function(jnp.ones(1), flag=False, count=3, factor=0.5).tolist() == [0]


def test_an_argument_that_is_absent():
    def scale(out, x, weight):
        for i in range(x.size):
            out[i] = x[i] if weight is None else x[i] * weight[0]

    function = Op("scale", kernels={"cpu": NumbaKernel(scale)}, reference=lambda x, weight: x)
    assert function(jnp.ones(2), None).tolist() == [1, 1]
    assert function(jnp.ones(2), jnp.full(1, 3.0)).tolist() == [3, 3]


class Scaled(eqxc.Layer):
    weight: jax.Array
    factor: float = eqx.field(static=True, default=2.0)
    kernels: ClassVar = {"cpu": NumbaKernel(lambda out, weight, x, factor: _scaled(out, weight, x, factor))}

    def reference(self, x):
        return self.factor * x * self.weight


@numba.njit
def _scaled(out, weight, x, factor):
    out[...] = factor * x * weight


def test_a_layer():
    layer = Scaled(jnp.arange(3.0))
    np.testing.assert_array_equal(layer(jnp.ones(3)), [0, 2, 4])


def row_sums(out, together, x):
    for i in range(x.shape[0]):
        together[i] = x.shape[0]
        out[i] = x[i].sum()


PROGRAM = """
import json, jax, jax.numpy as jnp
from tests.c.test_numba import sums
out, together = sums()(jnp.ones((40, 3)))
print(json.dumps([out.tolist(), together.tolist()]))
"""


def sums():
    kernel = NumbaKernel(
        numba.njit(row_sums),
        rows="parallel",
        out_type=lambda x: (
            (x[:, 0], jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))
            if isinstance(x, jax.Array)
            else (jax.ShapeDtypeStruct(x.shape[:1], x.dtype), jax.ShapeDtypeStruct(x.shape[:1], jnp.int32))
        ),
    )
    return Op("sums", kernels={"cpu": kernel})


def test_rows_run_side_by_side():
    command = [sys.executable, "-c", PROGRAM]
    environment = one_device.environment() | {"NPROC": "4"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[3.0] * 40, [10] * 40]


def test_an_exception_is_an_error_of_the_call():
    def refuses(out, x):
        if x[0] < 0:
            raise ValueError("negative")
        out[...] = x

    function = Op("refuses", kernels={"cpu": NumbaKernel(refuses)}, reference=lambda x: x)
    assert function(jnp.ones(1)).tolist() == [1]
    with pytest.raises(
        eqxc.KernelError, match=r"kernel refuses: it returned 1: it raised an exception, whose text Numba"
    ):
        function(-jnp.ones(1))


def test_what_numba_does_not_compile():
    def wrong(out, x):
        out[...] = no_such_name(x)  # noqa: F821 # pyright: ignore[reportUndefinedVariable]

    function = Op("wrong", kernels={"cpu": NumbaKernel(wrong)}, reference=lambda x: x)
    with pytest.raises(
        ValueError, match=r"wrong\[numba\]: Numba does not compile wrong for these types:\n(?s:.*)no_such_name"
    ):
        function(jnp.ones(1))


@pytest.mark.parametrize(
    ("dtype", "options", "error"),
    [
        (jnp.bfloat16, {}, r"saxpy\[numba\]: expected arrays of types that Numba has; got bfloat16 for result"),
        (jnp.float16, {}, r"saxpy\[numba\]: expected arrays of types that Numba has; got float16 for result"),
        (jnp.float32, {"a": "x"}, r"expected the option a to be a bool, an int or a float; got 'x'"),
    ],
)
def test_types_that_numba_lacks(dtype, options, error):
    x = jnp.ones(2, dtype)
    function = Op("saxpy", kernels={"cpu": NumbaKernel(saxpy)}, reference=lambda x, y, *, a: x + y)
    with pytest.raises(ValueError, match=error):
        function(x, x, **{"a": 2.0, **options})


def test_parameters_that_the_call_does_not_have():
    function = Op("saxpy", kernels={"cpu": NumbaKernel(saxpy)}, reference=lambda x, y: x + y)
    with pytest.raises(
        ValueError, match=r"expected saxpy to take 3 arrays, the results first, and then the options \(none\)"
    ):
        function(jnp.ones(2), jnp.ones(2))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (
            lambda: NumbaKernel(numba.njit(saxpy, parallel=True)),
            "expected no parallel=True: XLA calls kernels from several thr",
        ),
        (lambda: NumbaKernel(saxpy, options={"parallel": True}), "expected no parallel=True"),
        (lambda: NumbaKernel(3), "NumbaKernel: expected a function; got 3"),  # pyright: ignore[reportArgumentType]
        (lambda: NumbaKernel(saxpy, options=3), "expected options to be those of numba.njit; got 3"),  # pyright: ignore[reportArgumentType]
        (
            lambda: NumbaKernel(saxpy, options={"locals": {}}),
            "expected options that are hashable; got locals={}. Pass what",
        ),
        (lambda: NumbaKernel(saxpy, rows=3), "expected rows to be a tuple of texts; got 3"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_declarations(make, error):
    with pytest.raises((TypeError, ValueError), match=re.escape(error)):
        make()


def test_an_option_that_is_a_set():
    kernel = NumbaKernel(saxpy, options={"fastmath": {"nnan", "contract"}})
    assert hash(kernel) == hash(NumbaKernel(saxpy, options={"fastmath": {"contract", "nnan"}}))
    assert Op("saxpy", kernels={"cpu": kernel}, reference=saxpy_reference)(
        jnp.ones(2), jnp.ones(2), a=2.0
    ).tolist() == [3, 3]


def test_it_is_compiled_once_for_its_types(monkeypatch):
    compiled = []
    monkeypatch.setattr(_numba, "_cfunc", lambda *args, real=_numba._cfunc: compiled.append(args) or real(*args))
    x = jnp.arange(7.0)
    for factor in (1.0, 2.0, 3.0):
        jax.jit(lambda x, factor=factor: op()(x, x, a=factor))(x)
    op()(jnp.ones(9), jnp.ones(9), a=1.0)
    assert len(compiled) <= 1


def test_a_machine_without_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "Install eqxcallback[numba]" in str(eqxc.available_backends()["numba"])
    (call,) = eqxc.inspect(lambda x: op()(x, x, a=1.0), jnp.ones(3)).calls
    assert "Install eqxcallback[numba]" in call.fallback


def test_equal_kernels_are_one():
    assert NumbaKernel(saxpy) == NumbaKernel(saxpy)
    assert hash(NumbaKernel(saxpy, options={"fastmath": True})) == hash(NumbaKernel(saxpy, options={"fastmath": True}))
    assert NumbaKernel(saxpy) != dataclasses.replace(NumbaKernel(saxpy), rows="parallel")


def test_options_that_are_numbers_of_numpy():
    x = jnp.ones(3)
    for a in (np.float32(2), np.float64(2)):
        np.testing.assert_array_equal(op()(x, x, a=a), 3 * x)


def test_typed_keys():
    def words(out, key, x):
        for i in range(x.size):
            out[i] = np.float32(key[0] ^ key[1]) + x[i]

    def reference(key, x):
        first, second = jax.random.key_data(key)
        return (first ^ second).astype(jnp.float32) + x

    x, key = jnp.arange(3.0), jax.random.key(7)
    of_key = Op("words", kernels={"cpu": NumbaKernel(words)}, reference=reference)
    np.testing.assert_array_equal(of_key(key, x), reference(key, x))


def test_a_builtin():
    with pytest.raises(
        TypeError, match=r"NumbaKernel\(max\): expected a function in Python, whose parameters are known"
    ):
        NumbaKernel(max)
