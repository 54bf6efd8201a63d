"""A kernel with all that one call of it says, and what makes it runnable."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .. import xla
from ..kernel import NativeKernel, PythonKernel
from . import _native, _python


@dataclasses.dataclass(frozen=True, eq=False)
class Implementation:
    """**Attributes:**

    - `kernel`: what it is.
    - `aliases`: pairs of flat operand and result indices.
    - `options`: for a native kernel, its attributes.
    - `body`: for a Python kernel, its body as a function `(ctx, outputs, inputs)` of tuples of buffers.
    - `has_side_effect`: whether it must run if its results are unused.
    - `input_layouts`, `output_layouts`: as `jax.ffi.ffi_call` has them.
    """

    kernel: NativeKernel | PythonKernel
    aliases: tuple[tuple[int, int], ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    body: Callable[..., None] | None = None
    has_side_effect: bool = False
    input_layouts: tuple[Any, ...] | None = None
    output_layouts: tuple[Any, ...] | None = None


def prepare(implementation: Implementation, platform: str, who: str) -> xla.Plan:
    """Make it runnable on `platform`. Called when a program is lowered: nothing is compiled or loaded later."""
    kernel = implementation.kernel
    if isinstance(kernel, PythonKernel):
        return _python.prepare(implementation, kernel)
    return _native.prepare(implementation, kernel, platform, who)
