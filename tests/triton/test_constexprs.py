"""Constexprs that are equal and of other types: each has a program of its own."""

import jax
import jax.numpy as jnp
import pytest
import triton
import triton.language as tl

import eqxcallback as eqxc


pytestmark = pytest.mark.compilers


@triton.jit
def multiply(x, out, factor: tl.constexpr):
    tl.store(out, (tl.load(x) * factor).to(tl.float32))


def kernel(factor):
    return eqxc.TritonKernel(multiply, grid=1, constexprs={"factor": factor})


def program(factor):
    f = eqxc.Op("multiply", {"cuda": kernel(factor)}, reference=lambda x: (x * 2).astype(jnp.float32))
    return jax.jit(f).trace(jnp.ones(1, jnp.int32)).lower(lowering_platforms=("cuda",)).as_text()


def test_a_number_and_a_float_of_its_value(monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "sm_90")
    assert len({program(2), program(2.0)}) == 2
    assert program(2) == program(2)


@pytest.mark.parametrize(("one", "other"), [(2, 2.0), (1, True), (0.0, -0.0)])
def test_kernels(one, other):
    assert kernel(one) == kernel(one)
    assert kernel(one) != kernel(other)
