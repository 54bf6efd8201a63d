"""The choice of a technology for a kernel."""

from .. import xla
from ..kernel import DeviceKernel, PythonKernel
from . import _device, _native, _python
from ._implementation import Implementation


def prepare(implementation: Implementation, platform: str, who: str) -> xla.Plan:
    """Make it runnable on `platform`. Called when a program is lowered: nothing is compiled or loaded later."""
    kernel = implementation.kernel
    if isinstance(kernel, PythonKernel):
        return _python.prepare(implementation, kernel)
    if isinstance(kernel, DeviceKernel):
        return _device.prepare(implementation, kernel, platform, who)
    return _native.prepare(implementation, kernel, platform, who)
