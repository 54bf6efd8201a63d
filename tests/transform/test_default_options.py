"""Options that a call leaves out are what they are by default in the reference, for kernels without defaults of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .test_backward import NATIVE, native_library as native_library


X = jnp.arange(1.0, 4.0)
SOURCE = """void scale(long n, float factor, const float* x, float* out) {
  for (long i = 0; i < n; ++i) out[i] = factor * x[i];
}"""
CUDA_SOURCE = """extern "C" __global__ void scale(const float* x, float* out, float factor) {
  out[threadIdx.x] = factor * x[threadIdx.x];
}"""


def scaled(x, *, factor=3.0, unused=None):
    return factor * x


def with_numba(out, x, factor):
    for i in range(x.size):
        out[i] = factor * x[i]


def without_it(out, x):
    for i in range(x.size):
        out[i] = 3 * x[i]


C = eqxc.CKernel("scale", source=SOURCE, parameters=("x.size", "float factor", "const float* x", "float* out"))
CUDA = eqxc.CudaKernel(
    CUDA_SOURCE, "scale", eqxc.Launch(grid=1, block=lambda x, **_: x.size), scalars={"factor": "float32"}
)
KERNELS = {
    "c": C,
    "numba": eqxc.NumbaKernel(with_numba),
    "numba, that lacks it": eqxc.NumbaKernel(without_it),
    "cuda": CUDA,
}


@pytest.mark.parametrize("kind", KERNELS)
def test_what_a_call_leaves_out(kind):
    op = eqxc.Op("scale", {"cuda" if kind == "cuda" else "cpu": KERNELS[kind]}, scaled)
    op = eqxc.testing.emulated(op) if kind == "cuda" else op
    np.testing.assert_array_equal(jax.jit(op)(X), 3 * X)
    if "lacks" not in kind:
        np.testing.assert_array_equal(op(X, factor=2.0), 2 * X)


def test_attributes_of_native_kernels():
    """The kernel, and that of its gradient, take what they name."""

    def reference(w, x, *, power=3):
        return jnp.sin(x) * w**power

    kernel, backward = (eqxc.NativeKernel(name, NATIVE, attributes=("power",)) for name in ("Wave", "WaveBackward"))
    op = eqxc.Op("wave", {"cpu": kernel}, reference, backward=backward)
    for got, want in zip(jax.vjp(op, X, X)[1](X), jax.vjp(reference, X, X)[1](X), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_an_option_without_a_default_is_missing():
    op = eqxc.Op("scale", {"cpu": C}, lambda x, *, factor: factor * x)
    with pytest.raises(TypeError, match="factor"):
        op(X)
