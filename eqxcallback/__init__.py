"""External kernels as Equinox layers, in place on XLA's own buffers, under every JAX transformation."""

import importlib.metadata

from ._buffer_callback import buffer_callback as buffer_callback
from ._errors import KernelError as KernelError, raising as raising
from ._ext import (
    Buffer as Buffer,
    ExecutionContext as ExecutionContext,
    ExecutionStage as ExecutionStage,
)


__version__ = importlib.metadata.version("eqxcallback")
