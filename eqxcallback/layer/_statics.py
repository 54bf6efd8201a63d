"""The operands of a layer's kernel that are not buffers: static arguments of the call, and static fields of the layer."""

import numbers
import types
from collections.abc import Mapping, Sequence
from typing import Any

from ..core import PyTree, Value
from ..kernel import CKernel, CudaKernel, ImageKernel, NativeKernel, NumbaKernel, TvmFfiKernel
from . import _declarations as declarations


def of(
    kernel: Any, others: Mapping[str, object], layer: PyTree, args: Sequence[Value], kwargs: Mapping[str, PyTree]
) -> dict[str, Any]:
    """Return the static values of a call by name, with those of `others` that the kernel names."""
    cls = type(layer)
    given = {**dict(zip(declarations.names_of(cls, len(args)), args, strict=True)), **kwargs}
    statics = {}
    if isinstance(kernel, CKernel | NumbaKernel | TvmFfiKernel | CudaKernel | ImageKernel):
        # Their parameters name arrays and values alike.
        named = [name for name in kernel.names if name in given or hasattr(layer, name)]
        values = {name: given[name] if name in given else getattr(layer, name) for name in named}
        kinds = (numbers.Number, str, types.NoneType) if isinstance(kernel, TvmFfiKernel) else numbers.Number
        statics = {name: value for name, value in values.items() if isinstance(value, kinds)}
    wanted = _wanted(kernel)
    statics |= {name: value for name, value in others.items() if name in wanted}
    for name in wanted:
        if name in statics:
            continue
        if name not in given and not hasattr(layer, name):
            raise ValueError(
                f"{cls.__qualname__}: the kernel {kernel.name} takes {name!r}, which is neither an argument of the call nor "
                "a field of the layer."
            )
        statics[name] = given[name] if name in given else getattr(layer, name)
    return statics


def _wanted(kernel: Any) -> Sequence[str]:
    if isinstance(kernel, NativeKernel):
        return kernel.attributes or ()
    if isinstance(kernel, CKernel | NumbaKernel | TvmFfiKernel):
        return ()
    return [scalar for scalar, (_, function) in kernel.scalars.items() if function is None]
