"""A kernel that jax-triton calls, as a `JaxKernel`: lowered for a GPU, which needs none where `compute_capability` is said."""

import functools
import os

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc


pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("jax_triton", reason="jax-triton is not installed")

import jax_triton as jt
import triton
import triton.language as tl


@triton.jit
def saxpy_kernel(x, y, size, out, a: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    is_inside = at < size
    tl.store(out + at, a * tl.load(x + at, mask=is_inside) + tl.load(y + at, mask=is_inside), mask=is_inside)


@triton.jit
def negate_kernel(x, out):
    at = tl.program_id(0)
    tl.store(out + at, -tl.load(x + at))


def by_jax_triton(x, y, *, a):
    grid = (-(-x.size // 64),)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jt.triton_call(
        x, y, x.size, kernel=saxpy_kernel, out_shape=out, grid=grid, compute_capability=90, a=a, block=64
    )


saxpy = eqxc.Op(
    "saxpy",
    kernels={"cuda": eqxc.JaxKernel(by_jax_triton)},
    reference=lambda x, y, *, a: a * x + y,
    backward={"cuda": eqxc.JaxKernel(lambda args, out, cotangent, *, a: (a * cotangent, cotangent))},
    vmap_method={"x": "broadcast_all", "y": "broadcast_all"},
)
of_two = functools.partial(saxpy, a=2.0)
X = jnp.ones((3, 100))


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (of_two, ["tensor<3x100xf32>"]),
        (jax.vmap(of_two), ["tensor<3x100xf32>"]),  # one call for all examples
        (lambda x, y: of_two(of_two(x[0], y[0]), y[1]), ["tensor<100xf32>"] * 2),
        (jax.value_and_grad(lambda x, y: of_two(x, y).sum()), ["tensor<3x100xf32>"]),
    ],
    ids=["one", "vmap", "two", "gradients"],
)
def test_lowered(function, sizes):
    program = jax.jit(function).trace(X, X).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in program.splitlines() if "@triton_kernel_call" in line]
    assert [line.rpartition("-> ")[2].split(" ")[0].strip() for line in calls] == sizes
    report = eqxc.inspect(function, X, X, platform="cuda")
    assert {call.lane for call in report.calls} == {"jax"}


def test_beside_a_kernel_that_we_compile(monkeypatch, tmp_path):
    """A process that imports jax-triton has no folder for Triton's cache, without which Triton's compiler refuses to run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    kernel = eqxc.TritonKernel(negate_kernel, grid=lambda x: x.size, out_type=lambda x: x)
    both = jax.jit(lambda x, y: eqxc.Op("negate", {"cuda": kernel})(of_two(x, y)))
    program = both.trace(X, X).lower(lowering_platforms=("cuda",)).as_text()
    assert "@triton_kernel_call" in program
    assert "negate_kernel" in program
    assert os.environ["TRITON_CACHE_DIR"] == ""
    assert any((tmp_path / ".triton/cache").iterdir())
