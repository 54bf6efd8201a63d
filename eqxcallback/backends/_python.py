"""The python lane: bodies that XLA calls on its own buffers."""

from .. import xla
from ..kernel import PythonKernel
from ._bound_kernel import BoundKernel


def prepare(bound: BoundKernel, kernel: PythonKernel) -> xla.PythonLowering:
    return xla.PythonLowering(xla.FlatBody(bound.body or kernel.body), bound.call)
