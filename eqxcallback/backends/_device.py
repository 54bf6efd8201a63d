"""Kernels that our launcher launches on a GPU: how a program calls them, once it is known with which types."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .. import xla
from ..kernel import CudaKernel, DeviceKernel
from . import _cuda, _triton
from ._bound_kernel import BoundKernel
from ._description import description
from ._device_call import DeviceCall


def prepare(bound: BoundKernel, kernel: DeviceKernel, platform: str, who: str) -> xla.TypedLowering:
    who = f"{who}[{kernel.backend}]"
    if platform not in xla.launch_platforms():
        raise ValueError(
            f"{who}: expected the platform cuda; got {platform}. Give {platform} a kernel of another kind."
        )

    def launch(operands: Sequence[Any], results: Sequence[Any]) -> xla.LaunchLowering:
        call = DeviceCall.of(kernel, bound, _typed(operands), _typed(results), who)
        program = _cuda.compiled(kernel, call) if isinstance(kernel, CudaKernel) else _triton.compiled(kernel, call)
        words = np.concatenate([call.words, np.zeros(program.hidden, np.int64)])
        attributes: dict[str, Any] = {
            "who": who,
            "images": np.frombuffer(b"".join(program.images), np.uint8),
            "sizes": np.array([len(image) for image in program.images], np.int64),
            "entries": "\n".join(step.entry for step in program.steps),
            "geometry": np.array(
                [(*s.grid, *s.block, s.shared_bytes, s.image) for s in program.steps], np.int64
            ).ravel(),
        }
        # An attribute that is an empty array has no type.
        if len(words):
            attributes["scalars"] = words
        if call.nulls and isinstance(kernel, CudaKernel):  # of Triton they are no parameters
            attributes["nulls"] = np.array(call.nulls, np.int64)
        return xla.LaunchLowering(
            target,
            attributes,
            bound.call,
            tuple(xla.result_aval(workspace.shape, workspace.dtype) for workspace in call.workspaces),
        )

    target = xla.LAUNCH_CAPTURED if kernel.command_buffer_compatible else xla.LAUNCH
    return xla.TypedLowering(launch, target, functools.partial(description, kernel, who), bound.call)


def _typed(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
