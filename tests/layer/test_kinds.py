"""One layer of each kind of kernel, and all that `testing.check` asks of one."""

import shutil
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import CKernel, CudaKernel, JaxKernel, Launch, Layer, NativeKernel, NumbaKernel, PythonKernel


pytestmark = pytest.mark.any_jax_version


class Affine(Layer):
    """`factor * x + shift`, for x and shift of one shape, in f32."""

    shift: jax.Array
    factor: float = eqx.field(static=True, default=2.0)
    vmap_method = "sequential"

    def reference(self, x):
        return self.factor * x + self.shift


def in_numpy(ctx, out, layer, x):
    np.asarray(out)[...] = layer.factor * np.asarray(x) + np.asarray(layer.shift)


def in_numba(out, shift, x, factor):
    for i in range(x.size):
        out.flat[i] = np.float32(factor) * x.flat[i] + shift.flat[i]


IN_C = """
void affine(long n, float factor, const float* shift, const float* x, float* out) {
  for (long i = 0; i < n; ++i) out[i] = factor * x[i] + shift[i];
}
"""
IN_CPP = r"""
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;

static ffi::Error affine(Floats shift, Floats x, ffi::Result<Floats> out, double factor) {
  for (size_t i = 0; i < x.element_count(); ++i) {
    out->typed_data()[i] = static_cast<float>(factor) * x.typed_data()[i] + shift.typed_data()[i];
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Affine, affine,
                              ffi::Ffi::Bind().Arg<Floats>().Arg<Floats>().Ret<Floats>().Attr<double>("factor"));
"""
IN_CUDA = """
extern "C" __global__ void affine(const float* shift, const float* x, float* out, int n, float factor) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = factor * x[i] + shift[i];
}
"""
IN_TVM = """
void affine(tvm::ffi::TensorView shift, tvm::ffi::TensorView x, tvm::ffi::TensorView out, double factor) {
  auto floats = [](tvm::ffi::TensorView array) { return static_cast<float*>(array.data_ptr()); };
  for (int64_t i = 0; i < x.numel(); ++i) {
    floats(out)[i] = static_cast<float>(factor) * floats(x)[i] + floats(shift)[i];
  }
}
"""


def of_python(tmp_path):
    return "cpu", PythonKernel(in_numpy)


def of_numba(tmp_path):
    pytest.importorskip("numba", reason="Numba is not installed")
    return "cpu", NumbaKernel(in_numba)


def of_c(tmp_path):
    parameters = ("x.size", "float factor", "const float* self.shift", "const float* x", "float* out")
    return "cpu", CKernel("affine", source=IN_C, parameters=parameters)


def of_cpp(tmp_path):
    return "cpu", NativeKernel("Affine", source=IN_CPP, attributes=("factor",))


def of_jax(tmp_path):
    return "cpu", JaxKernel(lambda layer, x: layer.factor * x + layer.shift)


def of_tvm_ffi(tmp_path):
    tvm_ffi: Any = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    if shutil.which("ninja") is None:
        pytest.skip("tvm_ffi.cpp builds with ninja, which is not installed")
    library = tvm_ffi.cpp.build_inline("affine", cpp_sources=IN_TVM, functions="affine", build_directory=str(tmp_path))
    return "cpu", eqxc.TvmFfiKernel(library, "affine", ("self.shift", "x", "out", "factor"))


def of_cuda(tmp_path):
    scalars: Any = {"n": ("int32", lambda layer, x: x.size), "factor": "float32"}
    return "cuda", CudaKernel(IN_CUDA, "affine", Launch(lambda layer, x: -(-x.size // 64), 64), scalars=scalars)


def of_triton(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    from ..testing.triton_kernels import affine

    scalars: Any = {"size": ("int32", lambda layer, x: x.size), "factor": "float32"}
    return "cuda", eqxc.TritonKernel(
        affine, grid=lambda layer, x, **_: -(-x.size // 4), scalars=scalars, constexprs={"BLOCK": 4}
    )


KINDS = [of_python, of_numba, of_c, of_cpp, of_jax, of_tvm_ffi, of_cuda, of_triton]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_check_is_whole(kind, tmp_path):
    platform, kernel = kind(tmp_path)
    cls: Any = types.new_class("Affine", (Affine,), {}, lambda body: body.update(kernels={platform: kernel}))
    x = jnp.linspace(-1, 1, 6)
    typed = () if kind in (of_python, of_numba, of_jax) else ("dtypes",)
    report = eqxc.testing.check(cls(jnp.arange(6.0)), x, skip=(*typed, "odd shapes", "zero size"))
    assert report.passed, report
