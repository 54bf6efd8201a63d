"""Declarations of kernels: pure data. Nothing here traces, compiles or runs."""

from ._c import CKernel as CKernel
from ._cuda import CudaKernel as CudaKernel
from ._contract import KernelContract as KernelContract, anything as anything, as_tuple as as_tuple
from ._emulated import (
    Emulated as Emulated,
    EmulatedCuda as EmulatedCuda,
    EmulatedTriton as EmulatedTriton,
    emulated as emulated,
)
from ._frozen import Frozen as Frozen
from ._image import ImageKernel as ImageKernel
from ._jax import JaxKernel as JaxKernel
from ._launch import Launch as Launch, dims as dims
from ._native import NativeKernel as NativeKernel
from ._numba import NumbaKernel as NumbaKernel
from ._python import PythonKernel as PythonKernel
from ._tensor_map import PROMOTIONS as PROMOTIONS, SWIZZLES as SWIZZLES, TensorMap as TensorMap
from ._triton import TritonKernel as TritonKernel, check_readable as check_readable
from ._tvm_ffi import TvmFfiKernel as TvmFfiKernel, literal as literal


SourceKernel = CudaKernel | TritonKernel
"""Kernels for a GPU that are given as source, so that they can be emulated."""

DeviceKernel = SourceKernel | ImageKernel
"""Kernels that our launcher launches on a GPU."""

TypedKernel = DeviceKernel | CKernel | NumbaKernel | TvmFfiKernel
"""Kernels whose parameters are of the types that they are called with."""

Kernel = NativeKernel | PythonKernel | JaxKernel | TypedKernel
