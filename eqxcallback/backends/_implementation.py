"""A kernel with all that one call of it says."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..kernel import Kernel


@dataclasses.dataclass(frozen=True, eq=False)
class Implementation:
    """**Attributes:**

    - `kernel`: what it is.
    - `aliases`: pairs of flat operand and result indices.
    - `options`: for a native kernel, its attributes; for one that our launcher launches, what its scalars may be.
    - `arguments`: for the latter, what its functions are called with, `(args, options)`, of the types of flat operands and
        results.
    - `names`: for the latter, of operands and results.
    - `body`: for a Python kernel, its body as a function `(ctx, outputs, inputs)` of tuples of buffers.
    - `has_side_effect`: whether it must run if its results are unused.
    - `input_layouts`, `output_layouts`: as `jax.ffi.ffi_call` has them.
    """

    kernel: Kernel
    aliases: tuple[tuple[int, int], ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    body: Callable[..., None] | None = None
    arguments: Callable[[Sequence[Any], Sequence[Any]], tuple[tuple[Any, ...], Mapping[str, Any]]] | None = None
    names: tuple[str, ...] = ()
    has_side_effect: bool = False
    input_layouts: tuple[Any, ...] | None = None
    output_layouts: tuple[Any, ...] | None = None
