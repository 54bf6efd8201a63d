"""`python -m tests.stress.compilations KIND COUNT`: so many programs, each with a kernel of its own, and what stays of them.

It prints bytes for each one of the second half, when every cache of ours that has a limit is full.
"""

import ctypes
import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc
from eqxcallback import CKernel, CudaKernel, JaxKernel, Launch, NativeKernel, NumbaKernel, Op, PythonKernel


IN_C = "void twice(long n, const float* x, float* out) { for (long i = 0; i < n; ++i) out[i] = 2 * x[i]; }"
IN_CPP = r"""
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;

static ffi::Error twice(ffi::Buffer<ffi::F32> x, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  for (size_t i = 0; i < x.element_count(); ++i) out->typed_data()[i] = 2 * x.typed_data()[i];
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Twice, twice,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
"""
IN_CUDA = """
extern "C" __global__ void twice(const float* x, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = 2 * x[i];
}
"""
IN_TVM = """
void twice(tvm::ffi::TensorView x, tvm::ffi::TensorView out) {
  auto floats = [](tvm::ffi::TensorView array) { return static_cast<float*>(array.data_ptr()); };
  for (int64_t i = 0; i < x.numel(); ++i) floats(out)[i] = 2 * floats(x)[i];
}
"""


def blocks(x: Any, **_: Any) -> int:
    return -(-x.size // 64)


def of_python() -> PythonKernel:
    def twice(ctx, out, x, size):
        np.multiply(np.asarray(x), 2, out=np.asarray(out))

    return PythonKernel(twice)


def in_numba(out, x, size):
    for i in range(x.size):
        out[i] = 2 * x[i]


def of_numba() -> NumbaKernel:
    return NumbaKernel(in_numba)


def of_c() -> CKernel:
    return CKernel("twice", source=IN_C, parameters=("x.size", "const float* x", "float* out"))


def of_cpp() -> NativeKernel:
    return NativeKernel("Twice", source=IN_CPP)


def of_jax() -> JaxKernel:
    return JaxKernel(lambda x, *, size: 2 * x)


@functools.cache
def tvm_library() -> str:
    import tvm_ffi.cpp

    return tvm_ffi.cpp.build_inline("twice", cpp_sources=IN_TVM, functions="twice")


def of_tvm_ffi() -> Any:
    return eqxc.TvmFfiKernel(tvm_library(), "twice", ("x", "out"))


def of_cuda() -> CudaKernel:
    return CudaKernel(IN_CUDA, "twice", Launch(blocks, 64), scalars={"n": ("int32", lambda x, **_: x.size)})


PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry twice(.param .u64 x, .param .u64 out, .param .u32 n) { ret; }
"""


def of_image() -> eqxc.ImageKernel:
    parameters = ("const float* x", "float* out", "int x.size")
    return eqxc.ImageKernel(PTX, "twice", Launch(blocks, 64), parameters=parameters)


def of_triton() -> Any:
    from ..testing.triton_kernels import row_sums

    return eqxc.TritonKernel(row_sums, grid=lambda x, **_: x.size, scalars={"size": "int32"}, constexprs={"BLOCK": 1})


PLATFORM = {of_cuda: "cuda", of_image: "cuda", of_triton: "cuda"}
KINDS: dict[str, Callable[[], Any] | None] = {
    "nothing": None,
    "python": of_python,
    "numba": of_numba,
    "c": of_c,
    "cpp": of_cpp,
    "jax": of_jax,
    "tvm_ffi": of_tvm_ffi,
    "cuda": of_cuda,
    "image": of_image,
    "triton": of_triton,
}


def program(make: Callable[[], Any] | None, number: int) -> None:
    """Made and run once on the CPU; for GPUs it is lowered, which is where their compilers run."""
    x = jnp.arange(8.0)
    if make is None:
        function = lambda x, *, size: 2 * x
    else:
        kernels = {PLATFORM.get(make, "cpu"): make()}
        function = Op("twice", kernels=kernels, reference=lambda x, *, size: 2 * x)
    traced = jax.jit(lambda x: function(x, size=1) + number).trace(x)
    if make in PLATFORM:
        traced.lower(lowering_platforms=("cuda",))
    else:
        np.testing.assert_array_equal(traced.lower().compile()(x), 2 * x + number)


def resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def main(kind: str, count: int) -> None:
    sizes = []
    for number in range(count):
        program(KINDS[kind], number)
        if number % 250 == 249:
            jax.clear_caches()
            sizes.append(resident())
            print(number + 1, sizes[-1], file=sys.stderr, flush=True)
    half = sizes[len(sizes) // 2 - 1 :]
    print((half[-1] - half[0]) // (250 * (len(half) - 1)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
