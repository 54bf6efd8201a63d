"""A user's op and layer in CUDA C++, which programs in other processes import as well."""

from typing import ClassVar

import equinox as eqx
import jax

import eqxcallback as eqxc


SOURCE = """
extern "C" __global__ void saxpy(const float* x, const float* y, float* out, int n, float a) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a * x[i] + y[i];
}
extern "C" __global__ void gradients(const float* x, const float* y, const float* out, const float* ct, float* dx,
                                     float* dy, int n, float a) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    if (dx) dx[i] = a * ct[i];
    if (dy) dy[i] = ct[i];
  }
}
"""


def op(**changed):
    """`a * x + y`, with a backward kernel. `changed`: fields of the forward one."""
    forward = {
        "source": SOURCE,
        "entry": "saxpy",
        "launch": eqxc.Launch(grid=lambda x, y, *, a: -(-x.size // 256), block=256),
        "scalars": {"n": ("int32", lambda x, y, *, a: x.size), "a": "float32"},
    }
    backward = eqxc.CudaKernel(
        SOURCE,
        "gradients",
        eqxc.Launch(grid=lambda grads, args, out, cotangents, *, a: -(-args[0].size // 256), block=256),
        scalars={"n": ("int32", lambda grads, args, out, cotangents, *, a: args[0].size), "a": "float32"},
    )
    return eqxc.Op(
        "saxpy",
        kernels={"cuda": eqxc.CudaKernel(**{**forward, **changed})},
        backward={"cuda": backward},
        reference=lambda x, y, *, a: a * x + y,
        vmap_method={"x": "broadcast_all", "y": "broadcast_all"},
    )


class Saxpy(eqxc.Layer):
    """The same, with `y` among the layer's own arrays, which come first."""

    y: jax.Array
    a: float = eqx.field(static=True)
    kernels: ClassVar = {
        "cuda": eqxc.CudaKernel(
            SOURCE.replace("const float* x, const float* y, float* out", "const float* y, const float* x, float* out"),
            "saxpy",
            eqxc.Launch(grid=lambda self, x: -(-x.size // 256), block=256),
            scalars={"n": ("int32", lambda self, x: x.size), "a": "float32"},
        )
    }
    vmap_method = "fold"

    def reference(self, x):
        return self.a * x + self.y
