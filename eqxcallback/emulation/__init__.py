"""Kernels for GPUs on a CPU: CUDA C++ built by g++, Triton by its own interpreter."""

from ._build import build as build
from ._cuda import CudaLibrary as CudaLibrary, unavailable as unavailable
from ._errors import NotEmulated as NotEmulated
from ._triton import (
    TritonFunction as TritonFunction,
    need_triton as need_triton,
    portable_constants as portable_constants,
)
