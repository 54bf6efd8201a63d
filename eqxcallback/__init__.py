"""External kernels as Equinox layers, in place on XLA's own buffers, under every JAX transformation."""

from importlib import metadata as _metadata

from . import debug as debug, nn as nn, ops as ops, testing as testing
from ._buffer_callback import buffer_callback as buffer_callback
from ._errors import KernelError as KernelError, raising as raising
from ._export import export as export
from ._ext import (
    Buffer as Buffer,
    ExecutionContext as ExecutionContext,
    ExecutionStage as ExecutionStage,
)
from ._jit_captured import jit_captured as jit_captured
from .backends import available_backends as available_backends
from .fusion import fuse as fuse, unfuse as unfuse
from .inspection import inspect as inspect
from .kernel import (
    CudaKernel as CudaKernel,
    Launch as Launch,
    NativeKernel as NativeKernel,
    PythonKernel as PythonKernel,
    TritonKernel as TritonKernel,
)
from .layer import Layer as Layer
from .op import Op as Op
from .xla import KernelHandle as KernelHandle


__version__ = _metadata.version("eqxcallback")
