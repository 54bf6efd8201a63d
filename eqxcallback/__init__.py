"""External kernels as Equinox layers, in place on XLA's own buffers, under every JAX transformation."""

import importlib as _importlib
import typing as _typing
from importlib import metadata as _metadata

from . import _built as _built, debug as debug, nn as nn, ops as ops
from ._ext import Buffer as Buffer, ExecutionContext as ExecutionContext, ExecutionStage as ExecutionStage
from .backends import available_backends as available_backends
from .callback import buffer_callback as buffer_callback
from .core import KernelError as KernelError, PerformanceWarning as PerformanceWarning, raising as raising
from .fusion import fuse as fuse, FuseRule as FuseRule, unfuse as unfuse
from .inspection import inspect as inspect
from .kernel import (
    CKernel as CKernel,
    CudaKernel as CudaKernel,
    ImageKernel as ImageKernel,
    Launch as Launch,
    JaxKernel as JaxKernel,
    NativeKernel as NativeKernel,
    NumbaKernel as NumbaKernel,
    PythonKernel as PythonKernel,
    TensorMap as TensorMap,
    TritonKernel as TritonKernel,
    TvmFfiKernel as TvmFfiKernel,
)
from .layer import Layer as Layer
from .program import (
    export as export,
    jit_captured as jit_captured,
    load as load,
    tune as tune,
    Tuned as Tuned,
    use_huge_pages as use_huge_pages,
)
from .transform import Op as Op, op as op, save_only_these_kernels as save_only_these_kernels
from .xla import KernelHandle as KernelHandle


if _typing.TYPE_CHECKING:
    from . import testing as testing

__version__ = _metadata.version("eqxcallback")


def __getattr__(name: str) -> _typing.Any:
    """`testing` is imported when it is asked for: most programs never do, and each would wait for it."""
    if name == "testing":
        return _importlib.import_module(".testing", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
