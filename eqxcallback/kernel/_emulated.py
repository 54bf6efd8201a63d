"""Kernels for a GPU that run on a CPU."""

import dataclasses
import functools

from ._cuda import CudaKernel
from ._triton import TritonKernel


class EmulatedCuda(CudaKernel):
    """Built by g++, and run with a fiber for each thread."""


class EmulatedTriton(TritonKernel):
    """Run by Triton's interpreter."""


Emulated = EmulatedCuda | EmulatedTriton


@functools.lru_cache(maxsize=512)
def emulated(kernel: CudaKernel | TritonKernel) -> Emulated:
    """The same kernel for a CPU."""
    kind = EmulatedCuda if isinstance(kernel, CudaKernel) else EmulatedTriton
    return kind(**{field.name: getattr(kernel, field.name) for field in dataclasses.fields(kernel)})
