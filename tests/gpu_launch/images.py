"""One source, compiled to every kind of image, and how its kernels are called: with parameters in an order of their own."""

import functools
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc
from eqxcallback.backends import _nvrtc


SOURCE = """
struct Shift { float scale; long long count; bool twice; };

extern "C" __global__ void affine(float* out, long long n, Shift shift, const float* x, int row, float a, float* work,
                                  const float* bias, short period, double one, const void* nothing) {
  long long i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n || nothing != nullptr || n != shift.count) return;
  work[i] = a * x[i];
  out[i] = one * work[i] + (shift.twice ? 2 : 1) * shift.scale * (i % row % 2) + (bias ? bias[i % period] : 0);
}

__global__ void gradients(int n, const float* dout, float* dx, float* dbias, int period, float a) {
  int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (dx) {
    for (int i = column; i < n; i += gridDim.x * blockDim.x) dx[i] = a * dout[i];
  }
  if (dbias == nullptr || column >= period) return;
  float sum = 0;
  for (int i = column; i < n; i += period) sum += dout[i];
  dbias[column] = sum;
}
"""
# C++ has a name of its own for the second one.
GRADIENTS = "_Z9gradientsiPKfPfS1_if"
ENTRIES = {"affine": "affine", GRADIENTS: "gradients"}
SIZES = {"affine": (8, 8, 24, 8, 4, 4, 8, 8, 2, 8, 8), GRADIENTS: (4, 8, 8, 8, 4, 4)}

SHIFT = np.dtype([("scale", "f4"), ("count", "i8"), ("twice", "?")], align=True)
PARAMETERS = (
    "float* __restrict__ out",
    "long long x.size",
    "const Shift shift",
    "const float* x",
    "int x.strides[-2]",
    "float a",
    "float *workspace[0]",
    "bias",
    "period",
    "double 1",
    "const void* 0",
)
FORWARD = {
    "launch": eqxc.Launch(grid=lambda x, bias, *, a: -(-x.size // 64), block=64),
    "parameters": PARAMETERS,
    "scalars": {
        "shift": (SHIFT, lambda x, bias, *, a: (0.25, x.size, True)),
        "period": ("int16", lambda x, bias, *, a: 1 if bias is None else bias.size),
    },
    "workspaces": lambda x, bias, *, a: [jax.ShapeDtypeStruct(x.shape, x.dtype)],
}
BACKWARD = {
    "launch": eqxc.Launch(grid=lambda grads, args, out, cotangents, *, a: -(-args[0].size // 64), block=64),
    "parameters": ("int dout.size", "const float* dout", "float* dx", "float* dbias", "int dbias.size", "float a"),
}


@functools.cache
def compiled(arch: str) -> bytes:
    """A cubin for `sm_90` and others, PTX for `compute_90` and others."""
    flags = (f"--gpu-architecture={arch}",)
    image, names, _ = _nvrtc.find().compile(SOURCE, "source.cu", flags, ("affine", "gradients"), arch.startswith("sm"))
    assert names == ["affine", GRADIENTS]
    return image if arch.startswith("sm") else image.rstrip(b"\0")


def fatbin(folder: pathlib.Path, *archs: str, compress: bool = False) -> bytes:
    """Make a fatbin of several images. Raises `FileNotFoundError` where NVIDIA's tool is not installed."""
    tools = [root / "cu13/bin/fatbinary" for root in map(pathlib.Path, _nvrtc._roots())]
    tool = next((path for path in tools if path.is_file()), None)
    if tool is None:
        raise FileNotFoundError("fatbinary of nvidia-cuda-nvcc")
    options = [
        "-64",
        "--create",
        str(folder / "fatbin"),
        *(["-compress-all"] if compress else ["--compress-mode=none"]),
    ]
    for arch in archs:
        path = folder / arch
        path.write_bytes(compiled(arch))
        kind, _, version = arch.partition("_")
        options += ["--image3", f"kind={'elf' if kind == 'sm' else 'ptx'},sm={version},file={path}"]
    subprocess.run([str(tool), *options], check=True)
    return (folder / "fatbin").read_bytes()


def reference(x, bias, *, a):
    shifted = jnp.broadcast_to(jnp.arange(x.shape[-1]) % 2, x.shape).astype(x.dtype) / 2
    return a * x + shifted + (0 if bias is None else bias)


def op(forward, backward=None, platform="cpu"):
    return eqxc.Op(
        "affine",
        kernels={platform: forward},
        backward=None if backward is None else {platform: backward},
        reference=reference,
        vmap_method={"x": "broadcast_all", "bias": "fold"},
    )


def image_op(image, platform="cpu", **changed):
    return op(
        eqxc.ImageKernel(image, "affine", **{**FORWARD, **changed}),
        eqxc.ImageKernel(image, "gradients", **BACKWARD),
        platform,
    )


def source_op(platform="cpu"):
    """The same as CUDA C++."""
    return op(eqxc.CudaKernel(SOURCE, "affine", **FORWARD), eqxc.CudaKernel(SOURCE, "gradients", **BACKWARD), platform)


X = BIAS = jax.ShapeDtypeStruct((4, 10), jnp.float32)


def lowered(image, platforms=("cuda",), **changed):
    f = functools.partial(image_op(image, "cuda", **changed), a=3.0)
    return jax.jit(f).trace(X, BIAS).lower(lowering_platforms=platforms)
