"""JAX functions in the place of kernels: they are part of the program, which XLA compiles."""

import functools

from .. import xla
from ..kernel import JaxKernel
from ._bound_kernel import BoundKernel
from ._description import description


def prepare(bound: BoundKernel, kernel: JaxKernel, who: str) -> xla.JaxLowering:
    assert bound.function is not None
    return xla.JaxLowering(bound.function, functools.partial(description, kernel, f"{who}[jax]"), bound.call)
