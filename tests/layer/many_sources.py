"""One layer from three languages: C++ on a CPU, forward and backward; on a GPU forward in Triton, and backward in CUDA C++."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import triton
import triton.language as tl

import eqxcallback as eqxc


# An operand that lacks the leading axes of the result repeats itself, and its gradient is the sum over them.
IN_CPP = r"""
#include <cmath>

#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Result = ffi::ResultBuffer<ffi::F32>;

static float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

static ffi::Error swish(Floats weight, Floats x, Result out, double slope) {
  const float a = static_cast<float>(slope);
  for (size_t i = 0; i < out->element_count(); ++i) {
    const float b = x.typed_data()[i % x.element_count()];
    out->typed_data()[i] = weight.typed_data()[i % weight.element_count()] * b * sigmoid(a * b);
  }
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Swish, swish,
                              ffi::Ffi::Bind().Arg<Floats>().Arg<Floats>().Ret<Floats>().Attr<double>("slope"));

static ffi::Error gradients(Floats weight, Floats x, Floats, Floats ct, Result dweight, Result dx, double slope) {
  const float a = static_cast<float>(slope);
  for (size_t i = 0; i < dweight->element_count(); ++i) dweight->typed_data()[i] = 0;
  for (size_t i = 0; i < dx->element_count(); ++i) dx->typed_data()[i] = 0;
  for (size_t i = 0; i < ct.element_count(); ++i) {
    const float b = x.typed_data()[i % x.element_count()], s = sigmoid(a * b), g = ct.typed_data()[i];
    dweight->typed_data()[i % dweight->element_count()] += g * b * s;
    dx->typed_data()[i % dx->element_count()] +=
        g * weight.typed_data()[i % weight.element_count()] * (s + a * b * s * (1 - s));
  }
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Gradients, gradients,
                              ffi::Ffi::Bind().Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Floats>()
                                  .Ret<Floats>().Ret<Floats>().Attr<double>("slope"));
"""


@triton.jit
def swish(weight, x, out, nw, nx, size, slope, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    b = tl.load(x + at % nx, mask=there)
    tl.store(out + at, tl.load(weight + at % nw, mask=there) * b * tl.sigmoid(slope * b), mask=there)


# A thread for each element of the longer gradient. One that is not needed is a null pointer, and has no elements.
IN_CUDA = """
extern "C" __global__ void gradients(const float* weight, const float* x, const float* out, const float* ct,
                                     float* dweight, float* dx, int nw, int nx, int mw, int mx, int n, float slope) {
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  float sum = 0;
  if (thread < mw) {
    for (int i = thread; i < n; i += mw) sum += ct[i] * x[i % nx] / (1 + expf(-slope * x[i % nx]));
    dweight[thread] = sum;
  }
  sum = 0;
  if (thread < mx) {
    for (int i = thread; i < n; i += mx) {
      const float s = 1 / (1 + expf(-slope * x[i % nx]));
      sum += ct[i] * weight[i % nw] * (s + slope * x[i % nx] * s * (1 - s));
    }
    dx[thread] = sum;
  }
}
"""
_BLOCK = 32


def _forward_sizes(layer, x) -> tuple[int, ...]:
    return layer.weight.size, x.size, max(layer.weight.size, x.size)


def _backward_sizes(layer, grads, args, out, cotangents) -> tuple[int, ...]:
    needed = (0 if grad is None else grad.size for grad in (grads[0].weight, grads[1]))
    return layer.weight.size, args[0].size, *needed, cotangents.size


def _scalars(names: tuple[str, ...], sizes: Any) -> dict[str, Any]:
    numbers = {name: ("int32", lambda *args, i=i: sizes(*args)[i]) for i, name in enumerate(names)}
    return {**numbers, "slope": "float32"}


class Swish(eqxc.Layer):
    """`weight * x * sigmoid(slope * x)` for `x` and `weight` of one shape."""

    vmap_method = "fold"
    weight: jax.Array
    slope: float = eqx.field(static=True)

    def reference(self, x):
        return self.weight * x * jax.nn.sigmoid(self.slope * x)


class OfManySources(Swish):
    kernels: ClassVar = {
        "cpu": eqxc.NativeKernel("Swish", source=IN_CPP, attributes=("slope",)),
        "cuda": eqxc.TritonKernel(
            swish,
            grid=lambda *args, BLOCK: -(-_forward_sizes(*args)[-1] // BLOCK),  # noqa: N803
            scalars=_scalars(("nw", "nx", "size"), _forward_sizes),
            constexprs={"BLOCK": _BLOCK},
        ),
    }
    backward_kernels: ClassVar = {
        "cpu": eqxc.NativeKernel("Gradients", source=IN_CPP, attributes=("slope",)),
        "cuda": eqxc.CudaKernel(
            IN_CUDA,
            "gradients",
            eqxc.Launch(lambda *args: -(-max(_backward_sizes(*args)[2:4]) // _BLOCK), _BLOCK),
            scalars=_scalars(("nw", "nx", "mw", "mx", "n"), _backward_sizes),
        ),
    }
