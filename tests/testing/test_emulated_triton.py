"""Kernels in Triton that `check` runs on a CPU."""

import importlib.util
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.emulation import TritonFunction, portable_constants
from eqxcallback.testing import CheckFailed, check, emulated

from .catching import failed_rows


pytest.importorskip("triton", reason="Triton is not installed")

from . import triton_kernels as kernels


X = jnp.linspace(-1, 1, 39).reshape(3, 13)
FEW = ("reference", "vmap", "grad")


def test_a_right_kernel_passes():
    report = check(
        kernels.sums_of(kernels.row_sums), X, only=(*FEW, "outputs written", "odd shapes", "threads", "zero size")
    )
    assert report.passed
    assert report.subject.endswith("its kernels for cuda emulated")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_sums_of_16_bits_are_rounded(dtype):
    assert check(kernels.sums_of(kernels.row_sums), X.astype(dtype), only="reference").passed


def test_a_wrong_kernel_is_found():
    assert failed_rows(kernels.sums_of(kernels.wrong_sums), X, only=FEW) == ["reference", "vmap"]


def test_writes_beyond_the_end():
    with pytest.raises(CheckFailed, match="beyond writes beyond result"):
        check(kernels.sums_of(kernels.beyond), X, only="reference")


def test_what_the_interpreter_says():
    with pytest.raises(CheckFailed, match=r"sums\[triton, emulated\]: raises: .*one element at a time"):
        check(kernels.sums_of(kernels.raises), X, only="reference")


def test_a_kernel_that_is_defined_in_a_function():
    import triton
    import triton.language as tl

    helper = kernels.doubled

    @triton.jit
    def doubles(x, out, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, helper(tl.load(x + at)))

    kernel = eqxc.TritonKernel(doubles, grid=lambda x, BLOCK: x.size // BLOCK, constexprs={"BLOCK": 1})
    op = emulated(eqxc.Op("doubles", kernels={"cuda": kernel}, reference=lambda x: 2 * x, vmap_method="broadcast_all"))
    grads = jax.jit(jax.vmap(jax.grad(lambda x: op(x).sum())))(X)
    np.testing.assert_allclose(grads, np.full((3, 13), 2.0))
    np.testing.assert_allclose(op(X), 2 * X)


class Interrupted(Exception):
    pass


def test_an_interrupted_call_leaves_no_answer_to_the_next():
    function = TritonFunction.of(kernels.doubles)
    x, size = np.ones(8, np.float32), {"size": 8}
    block = portable_constants({"BLOCK": 8})

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        function.run((1,), {"x": x, "out": np.empty_like(x)}, size, block)  # the process is there
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Interrupted):
            function.run((1_000_000,), {"x": x, "out": np.empty_like(x)}, size, block)
    finally:
        signal.signal(signal.SIGALRM, before)
    out = np.empty_like(x)
    function.run((1,), {"x": 5 * x, "out": out}, size, block)
    np.testing.assert_array_equal(out, 10 * x)


def test_a_process_that_was_forked():
    """It asks an interpreter of its own, and its end does not wait for the other one."""
    code = """
import os, sys, numpy as np
from eqxcallback.emulation import TritonFunction, portable_constants
from tests.testing import triton_kernels

def doubled(x):
    x, out = np.full(8, x, np.float32), np.empty(8, np.float32)
    arrays = {"x": x, "out": out}
    TritonFunction.of(triton_kernels.doubles).run((1,), arrays, {"size": 8}, portable_constants({"BLOCK": 8}))
    return out[0]

print(doubled(1), flush=True)
if (child := os.fork()) == 0:
    print(doubled(2), flush=True)
    sys.exit()
print(os.waitpid(child, 0)[1], doubled(3), flush=True)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "2.0\n4.0\n0 6.0\n", result.stderr


class OfThisProcess:
    """A class of a module that other processes do not have."""

    __module__ = "nowhere"


def doubled_by(factor):
    kernel = eqxc.TritonKernel(kernels.scaled, grid=1, constexprs={"BLOCK": 8, "FACTOR": factor})
    return emulated(eqxc.Op("doubled", kernels={"cuda": kernel}, reference=lambda x: 2 * x))


def test_constexprs_that_another_process_cannot_have(monkeypatch):
    x = jnp.arange(8.0)
    np.testing.assert_array_equal(doubled_by(2)(x), 2 * x)
    with pytest.raises(eqxc.KernelError, match=r"doubled\[triton, emulated\]: a constexpr cannot be sent to another"):
        doubled_by(lambda x: lambda: 2)(x)
    monkeypatch.setitem(sys.modules, "nowhere", types.ModuleType("nowhere"))
    monkeypatch.setattr(sys.modules["nowhere"], "OfThisProcess", OfThisProcess, raising=False)
    with pytest.raises(eqxc.KernelError, match="scaled: ModuleNotFoundError: No module named 'nowhere'"):
        doubled_by(OfThisProcess())(x)
    np.testing.assert_array_equal(doubled_by(2)(x), 2 * x)


def test_what_triton_does_not_take():
    tuned = eqxc.Op("tuned", kernels={"cuda": eqxc.TritonKernel(kernels.tuned, grid=1)}, reference=lambda x: x)
    with pytest.raises(eqxc.KernelError, match=r"expected fn to be a triton\.jit function; got .*Autotuner"):
        emulated(tuned)(jnp.ones(8))
    with pytest.raises(eqxc.KernelError, match=r"Triton has no type for x, complex64; it has bool"):
        doubled_by(2)(jnp.ones(8, jnp.complex64))


def test_without_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    absent = eqxc.Op("absent", kernels={"cuda": eqxc.TritonKernel("nowhere:sums", grid=1)}, reference=lambda x: x)
    report = check(absent, X, only=FEW)
    assert [row.result for row in report.rows] == ["not run"] * 3
    assert "Triton is not installed. Install eqxcallback[triton]." in report["grad"].detail
