"""Declarations of a call beside its operands and results."""

import dataclasses
from collections.abc import Sequence

from ...core import Aval
from ._layouts import Layouts, full_layouts


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """**Attributes:**

    - `aliases`: sorted pairs of flat operand and result indices: the result overwrites the operand.
    - `has_side_effect`: whether XLA must keep the call if its results are unused.
    - `command_buffer_compatible`: whether XLA may record it.
    - `input_layouts`, `output_layouts`: for each array the axes from major to minor, or `None` where it is row-major; as in
        `jax.ffi.ffi_call`.
    - `gradients`: for a backward kernel, the operands whose gradients are its results.
    """

    aliases: tuple[tuple[int, int], ...] = ()
    has_side_effect: bool = False
    command_buffer_compatible: bool = False
    input_layouts: Layouts | None = None
    output_layouts: Layouts | None = None
    gradients: tuple[int, ...] = ()

    def full_layouts(
        self, operands: Sequence[Aval], results: Sequence[Aval]
    ) -> tuple[list[tuple[int, ...]] | None, list[tuple[int, ...]] | None]:
        """One for each array of these types, or `None` where all are row-major."""
        return full_layouts(self.input_layouts, operands), full_layouts(self.output_layouts, results)
