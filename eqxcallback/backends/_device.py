"""Kernels that our launcher launches on a GPU: how a program calls them, once it is known with which types."""

import functools
from collections.abc import Sequence

import numpy as np

from .. import xla
from ..core import Aval
from ..kernel import CudaKernel, DeviceKernel, ImageKernel, TritonKernel
from . import _cuda, _image_kernel, _triton
from ._bound_kernel import BoundKernel
from ._description import description
from ._device_call import DeviceCall, typed
from ._resident import call_of
from ._step import Program


def prepare(bound: BoundKernel, kernel: DeviceKernel, platform: str, who: str) -> xla.TypedLowering:
    who = f"{who}[{kernel.backend}]"
    if platform not in xla.launch_platforms():
        raise ValueError(
            f"{who}: expected the platform cuda; got {platform}. Give {platform} a kernel of another kind."
        )

    def launch(operands: Sequence[Aval], results: Sequence[Aval]) -> xla.LaunchLowering:
        call = call_of(kernel, bound, typed(operands), typed(results), who)
        program = _compiled(kernel, call)
        attributes = {"who": who, **program.attributes(call.words)}
        if any(dtype.itemsize > 8 for _, dtype, _ in call.scalars):
            attributes["starts"] = np.array(call.starts, np.int64)
        if call.addresses:
            attributes["addresses"] = np.array(call.addresses, np.int64).ravel()
        if call.maps:
            attributes["maps"] = np.array(call.maps, np.int64)
        if call.order:  # a kernel that takes nothing does not look at what it is passed
            attributes["order"] = np.array(call.order, np.int64)
        if call.nulls and not isinstance(kernel, TritonKernel):  # Triton does not count them as parameters
            attributes["nulls"] = np.array(call.nulls, np.int64)
        workspaces = [xla.result_aval(workspace.shape, workspace.dtype) for workspace in call.workspaces]
        if program.scratch_bytes:
            workspaces.append(xla.result_aval((program.scratch_bytes,), np.dtype(np.uint8)))
        return xla.LaunchLowering(target, attributes, bound.call, tuple(workspaces))

    target = xla.LAUNCH_CAPTURED if kernel.command_buffer_compatible else xla.LAUNCH
    return xla.TypedLowering(launch, target, functools.partial(description, kernel, who), bound.call)


def _compiled(kernel: DeviceKernel, call: DeviceCall) -> Program:
    if isinstance(kernel, CudaKernel):
        return _cuda.compiled(kernel, call)
    if isinstance(kernel, ImageKernel):
        return _image_kernel.compiled(kernel, call)
    return _triton.compiled(kernel, call)
