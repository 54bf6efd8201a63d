"""A kernel with all that one call of it says."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..kernel import Kernel


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

    kernel: Kernel
    aliases: tuple[tuple[int, int], ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    body: Callable[..., None] | None = None
    has_side_effect: bool = False
    input_layouts: tuple[Any, ...] | None = None
    output_layouts: tuple[Any, ...] | None = None
