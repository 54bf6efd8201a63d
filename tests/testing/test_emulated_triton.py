"""Kernels in Triton that `check` runs on a CPU."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
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


def test_without_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    absent = eqxc.Op("absent", kernels={"cuda": eqxc.TritonKernel("nowhere:sums", grid=1)}, reference=lambda x: x)
    report = check(absent, X, only=FEW)
    assert [row.result for row in report.rows] == ["not run"] * 3
    assert "Triton is not installed. Install eqxcallback[triton]." in report["grad"].detail
