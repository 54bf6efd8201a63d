"""The choice of a technology for a kernel."""

from .. import xla
from ..kernel import (
    CKernel,
    DeviceKernel,
    Emulated,
    JaxKernel,
    Kernel,
    NativeKernel,
    NumbaKernel,
    PythonKernel,
    TvmFfiKernel,
)
from . import _c, _device, _emulated, _jax, _native, _numba, _python, _tvm_ffi
from ._bound_kernel import BoundKernel


def prepare(bound: BoundKernel, platform: str, who: str) -> xla.Lowering:
    """Make it runnable on `platform`. Called when a program is lowered: nothing is compiled or loaded later, but what is
    emulated.
    """
    kernel = bound.kernel
    if isinstance(kernel, PythonKernel):
        return _python.prepare(bound, kernel)
    if isinstance(kernel, JaxKernel):
        return _jax.prepare(bound, kernel, who)
    if isinstance(kernel, CKernel):
        return _c.prepare(bound, kernel, platform, who)
    if isinstance(kernel, NumbaKernel):
        return _numba.prepare(bound, kernel, platform, who)
    if isinstance(kernel, TvmFfiKernel):
        return _tvm_ffi.prepare(bound, kernel, platform, who)
    if isinstance(kernel, Emulated):
        return _emulated.prepare(bound, kernel, platform, who)
    if isinstance(kernel, DeviceKernel):
        return _device.prepare(bound, kernel, platform, who)
    return _native.prepare(bound, kernel, platform, who)


def register_library(kernel: Kernel, platform: str, who: str, *, for_each: bool) -> None:
    """Register a kernel in a library, for `prepare`, before there is a program. Other kernels have nothing to register.

    **Arguments:** `for_each` is whether programs may call it for examples on XLA's threads.
    """
    target = None
    if isinstance(kernel, CKernel) and kernel.address is None:
        target = _c.library_target(kernel, platform, who)
    if isinstance(kernel, TvmFfiKernel) and not kernel.is_in_memory:
        _tvm_ffi.function_of(kernel, platform, who)
    if isinstance(kernel, NativeKernel) and (kernel.library is not None or kernel.source is not None):
        target = _native.library_target(kernel, platform, who)
    if for_each and target is not None and platform == "cpu":
        xla.target_for_each(target)
