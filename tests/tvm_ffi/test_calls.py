"""Functions of the TVM-FFI ABI as kernels: what they get, and that what they write arrives."""

import dataclasses
import functools
import importlib
import shutil
import subprocess
import sys
import threading
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import Op, TvmFfiKernel

from . import library
from .library import saxpy, saxpy_reference, tvm_ffi


I64 = jnp.int64
X = jnp.arange(6.0)
BACKWARD = TvmFfiKernel(library.PATH, "saxpy_backward", ("dout", "dx", "dy", "a"))


def op(**more):
    kernels = {"cpu": saxpy()}
    return Op("saxpy", kernels=kernels, reference=saxpy_reference, vmap_method="broadcast_all", **more)


def kernel(name, *words, **more):
    return Op(name, kernels={"cpu": TvmFfiKernel(library.PATH, name, words, **more)})


def test_gradients_by_tvm_ffi():
    """All else that is asked of a kernel: tests/layer/test_kinds.py."""
    rows = ("reference", "grad", "partial grads", "grad of vmap")
    assert eqxc.testing.check(op(backward={"cpu": BACKWARD}), X, jnp.ones(6), a=2.0, only=rows).passed


def test_gradients_that_are_not_needed_are_none():
    with_backward = op(backward={"cpu": BACKWARD})
    for needed, expected in (((0,), 24.0), ((1,), 8.0)):
        (grad,) = jax.grad(lambda x, y: (with_backward(x, y, a=3.0) ** 2).sum(), needed)(jnp.ones(5), jnp.ones(5))
        np.testing.assert_array_equal(grad, np.full(5, expected))


def test_it_runs_without_python():
    (call,) = eqxc.inspect(lambda x: op()(x, x, a=0.5), X).calls
    assert (call.lane, call.fallback) == ("native", "")
    assert eqxc.available_backends()["tvm_ffi"] is True


def test_nothing_holds_pythons_lock():
    with jax.enable_x64(True):
        asked = kernel("surroundings", "rets", out_type=lambda x: jax.ShapeDtypeStruct((5,), I64))
        assert asked(X).tolist() == [0, 0, 0, 1, 0]  # no lock, no streams, the CPU


DTYPES = {
    "bool": (6, 8),
    "int8": (0, 8),
    "uint16": (1, 16),
    "int64": (0, 64),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "float64": (2, 64),
    "complex64": (5, 64),
    "float8_e4m3fn": (10, 8),
    "float8_e5m2": (12, 8),
}


def describe(words, *args, named=lambda *args, **options: None, **options):
    """Return what a function is told of arguments, eight numbers each: see functions.cc. `named` has the names of parameters."""
    count = sum(len(args) if word == "args" else 1 for word in words)

    @functools.wraps(named)
    def out_type(*args, **options):
        return jax.ShapeDtypeStruct((count, 8), I64)

    with jax.enable_x64(True):
        asked = kernel(
            "describe",
            *words,
            "out",
            out_type=out_type,
            workspaces=[jax.ShapeDtypeStruct((7,), jnp.uint8)],
            scalars={"half": lambda x, *others, **options: x.size / 2},
        )
        return np.asarray(asked(*args, **options)).tolist()


def test_tensors_of_each_dtype():
    with jax.enable_x64(True):
        arrays = [jnp.zeros((2, 3, 4), dtype) for dtype in DTYPES]
    rows = describe(("args",), *arrays)
    expected = [
        [7, 0, code * 10000 + bits * 10 + 1, 10, 3, 234, 12 * 10**2 + 4 * 10 + 1, 0] for code, bits in DTYPES.values()
    ]
    assert rows == expected


def test_arguments_of_each_kind():
    words = ("args[1]", "rets[0]", "workspace[0]", "x", "k", "attrs.flag", "attrs.f", "s", "half", "ctx.stream")
    words += (3, 0.5, True, None, "'text'", "-7", "1e-3", "inf")
    rows = describe(words, X, None, named=lambda x, y, *, k, flag, f, s: None, k=-5, flag=True, f=1.25, s="größer")
    types = [row[0] for row in rows]
    assert types == [0, 7, 7, 7, 1, 2, 3, 8, 3, 4, 1, 3, 2, 0, 8, 1, 3, 3]
    values = {i: rows[i][2] for i in range(len(rows))}
    assert (values[0], values[4], values[5], values[9], values[10], values[12], values[13]) == (0, -5, 1, 0, 3, 1, 0)
    for i, number in ((6, 1.25), (8, 3.0), (11, 0.5), (16, 1e-3), (17, np.inf)):
        assert np.int64(values[i]).view(np.float64) == number
    assert rows[7][2:4] == [len("größer".encode()), ord("g")]  # bytes, as UTF-8
    assert rows[14][2:4] == [4, ord("t")]
    assert rows[2][5] == 7
    assert all(row[1] == 0 for row in rows)


def test_texts_that_are_all_empty():
    """They are in no attribute, as it would be empty. Each still has a place of its own."""
    rows = describe(("''",) * 40, X)
    assert [row[:1] + row[2:4] for row in rows] == [[8, 0, 0]] * 40


def test_no_arguments_but_arrays_in_order():
    """The arrays in order are what `arg_spec` is by default, as for `jax-tvm-ffi`."""
    rows = describe(("args",), X, jnp.zeros((1, 2)))
    assert [row[4] for row in rows] == [1, 2]


def test_a_scalar_and_an_empty_array():
    rows = describe(("args",), jnp.float32(1), jnp.zeros((0, 3)))
    assert [row[4:7] for row in rows] == [[0, 0, 0], [2, 3, 31]]


def test_more_arguments_than_usual():
    words = ("args",) * 4 + tuple(range(100))
    rows = describe(words, *[jnp.zeros((1,) * 6)] * 10)
    assert [row[2] for row in rows[40:]] == list(range(100))
    assert {tuple(row[4:7]) for row in rows[:40]} == {(6, 111111, 111111)}


def test_a_workspace():
    cumulate = kernel("cumulate", "x", "workspaces", "rets", workspaces=lambda x: [x], out_type=lambda x: x)
    assert cumulate(X).tolist() == [0, 1, 3, 6, 10, 15]


def test_options_that_are_texts():
    named = kernel("activation", "x", "kind", 0.5, "out", out_type=lambda x, *, kind: x)
    np.testing.assert_array_equal(named(X, kind="none"), X + 0.5)
    np.testing.assert_allclose(named(X, kind="tanh"), np.tanh(X + 0.5), rtol=1e-6)


class Named(eqxc.Layer):
    weight: jax.Array
    kind: str = eqx.field(static=True, default="none")
    shift: float | None = eqx.field(static=True, default=None)
    kernels: ClassVar = {"cpu": TvmFfiKernel(library.PATH, "activation", ("self.weight", "kind", "shift", "out"))}

    def reference(self, x):
        return self.weight + (self.shift or 0.0) + 0 * x


def test_a_layer():
    layer = Named(jnp.arange(3.0))
    np.testing.assert_array_equal(layer(jnp.ones(3)), [0, 1, 2])
    np.testing.assert_array_equal(Named(layer.weight, shift=2.0)(jnp.ones(3)), [2, 3, 4])
    assert eqxc.testing.check(layer, jnp.ones(3), only=("grad", "attributes")).passed


@pytest.mark.skipif(shutil.which("ninja") is None, reason="tvm_ffi.cpp builds with ninja, which is not installed")
def test_functions_in_memory(tmp_path):
    source = """
    void saxpy(tvm::ffi::TensorView x, tvm::ffi::TensorView y, tvm::ffi::TensorView out, double a) {
      for (int64_t i = 0; i < x.numel(); ++i) {
        static_cast<float*>(out.data_ptr())[i] =
            a * static_cast<const float*>(x.data_ptr())[i] + static_cast<const float*>(y.data_ptr())[i];
      }
    }
    """
    cpp = importlib.import_module("tvm_ffi.cpp")
    loaded = cpp.load_inline("in_memory", cpp_sources=source, functions="saxpy", build_directory=tmp_path)
    for given in (loaded, loaded.saxpy):
        function = TvmFfiKernel(given, "saxpy", library.SAXPY)
        assert function == TvmFfiKernel(given, "saxpy", library.SAXPY)
        in_memory = Op("saxpy", kernels={"cpu": function}, reference=saxpy_reference)
        texts = {jax.jit(lambda x, op=in_memory: op(x, x, a=1.0)).lower(X).as_text() for _ in range(2)}
        assert len(texts) == 1
        np.testing.assert_array_equal(in_memory(X, X, a=1.0), 2 * X)


def test_a_function_that_is_registered():
    said = []
    tvm_ffi.register_global_func("eqxcallback.tests.say", lambda *values: said.append(values), override=True)
    say = TvmFfiKernel(None, "eqxcallback.tests.say", ("n", 0.5, "'text'", None), out_type=lambda x, *, n: x)
    jax.block_until_ready(Op("say", kernels={"cpu": say})(X, n=3))
    assert said == [(3, 0.5, "text", None)]


def test_a_function_of_python_itself_takes_the_lock_when_it_runs():
    """TVM-FFI wraps it. Another thread of Python's runs meanwhile: the handler has not kept the lock."""
    meanwhile, reached = threading.Event(), threading.Event()

    def wait(stream):
        reached.set()
        assert meanwhile.wait(30)

    function = TvmFfiKernel(tvm_ffi.convert(wait), "wait", ("ctx.stream",), out_type=lambda x: x)
    thread = threading.Thread(target=lambda: (reached.wait(30), meanwhile.set()))
    thread.start()
    jax.block_until_ready(Op("wait", kernels={"cpu": function})(X))
    thread.join()


def test_two_devices():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    divided = op(sharding="i, i -> i")
    x = jax.device_put(jnp.arange(8.0), where)
    out = jax.jit(lambda x: divided(x, x, a=2.0))(x)
    np.testing.assert_array_equal(out, 3 * np.arange(8.0))
    assert out.sharding.is_equivalent_to(where, 1)


def test_checked_mode():
    bad = kernel("writes_too_much", "args", "rets", out_type=lambda x: x)
    with eqxc.debug.checked():
        np.testing.assert_array_equal(op()(X, X, a=1.0), 2 * X)
        with pytest.raises(eqxc.KernelError, match=r"output 0 .*: 3[12] bytes after its memory were overwritten"):
            jax.block_until_ready(bad(jnp.ones(4)))


def test_an_exported_program_finds_its_library(tmp_path):
    file = tmp_path / "program"
    file.write_bytes(eqxc.export(jax.jit(lambda x: op()(x, x, a=2.0)))(jnp.ones(3)).serialize())
    text = f"""
import eqxcallback as eqxc, jax.numpy as jnp
try:
    eqxc.load({str(file)!r})
except ValueError as error:
    print(error)
kernel = eqxc.TvmFfiKernel({library.PATH!r}, "saxpy", {library.SAXPY!r})
eqxc.Op("saxpy", kernels={{"cpu": kernel}}, reference=lambda x, y, *, a: a * x + y).register()
print(eqxc.load({str(file)!r}).call(jnp.ones(3)).tolist())
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    error, out = done.stdout.splitlines()
    assert "the program calls saxpy of a library of yours" in error
    assert out == "[3.0, 3.0, 3.0]"


def test_equal_kernels_are_one():
    assert saxpy() == saxpy()
    assert hash(saxpy()) == hash(saxpy())
    assert saxpy() != dataclasses.replace(saxpy(), command_buffer_compatible=True)
    assert TvmFfiKernel("a.so", "f", (1,)) != TvmFfiKernel("a.so", "f", (True,))
