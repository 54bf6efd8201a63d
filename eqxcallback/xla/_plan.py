"""What a kernel becomes when a program that calls it is lowered."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._body import CallSpec, PythonBody
from ._handles import EagerState, eager_state


@dataclasses.dataclass(frozen=True, eq=False)
class LaunchPlan:
    """The native lane: one custom call.

    **Attributes:**

    - `target`: the name of a registered handler.
    - `attributes`: typed values, see `_attributes.py`.
    - `aliases`: pairs of flat operand and result indices.
    - `has_side_effect`: whether XLA must keep the call if its results are unused.
    - `input_layouts`, `output_layouts`: for each, the axes from major to minor, or `None` where it is row-major; as in
        `jax.ffi.ffi_call`.
    - `workspaces`: types of results after the kernel's own, which nobody reads.
    """

    target: str
    attributes: Mapping[str, Any]
    aliases: tuple[tuple[int, int], ...] = ()
    has_side_effect: bool = False
    input_layouts: tuple[Any, ...] | None = None
    output_layouts: tuple[Any, ...] | None = None
    workspaces: tuple[Any, ...] = ()

    def for_types(self, operands: Sequence[Any], results: Sequence[Any]) -> "LaunchPlan":
        """What is called with operands and results of these types."""
        del operands, results
        return self

    @property
    def description(self) -> str:
        """The same text in each process, for plans that call the same."""
        layouts = self.input_layouts, self.output_layouts
        return repr((self.target, dict(self.attributes), self.aliases, self.has_side_effect, layouts))


@dataclasses.dataclass(frozen=True, eq=False)
class TypedPlan:
    """The native lane, where what is called depends on the types: `for_types(operands, results)` says it."""

    for_types: Callable[[Sequence[Any], Sequence[Any]], LaunchPlan]
    target: str
    describe: Callable[[], str]  # reads and hashes sources: not done before it is asked
    aliases: tuple[tuple[int, int], ...] = ()
    has_side_effect: bool = False
    command_buffer_compatible: bool = False

    @property
    def description(self) -> str:
        """The same text in each process, for plans that call the same."""
        return self.describe()


@dataclasses.dataclass(frozen=True, eq=False)
class PythonPlan:
    """The python lane: one call of `body`."""

    body: PythonBody
    aliases: tuple[tuple[int, int], ...] = ()
    has_side_effect: bool = False
    command_buffer_compatible: bool = False
    input_layouts: tuple[Any, ...] | None = None
    output_layouts: tuple[Any, ...] | None = None
    _last: dict[str, tuple[Any, CallSpec]] = dataclasses.field(default_factory=dict)

    def spec(self, result_avals: Sequence[Any]) -> CallSpec:
        avals, spec = self._last.get("spec", (None, None))
        if spec is None or avals is not result_avals:  # eager calls mostly repeat themselves
            spec = self._spec(result_avals)
            self._last["spec"] = (result_avals, spec)
        return spec

    def _spec(self, result_avals: Sequence[Any]) -> CallSpec:
        return CallSpec(
            tuple(result_avals),
            None,
            self.has_side_effect,
            self.aliases,
            self.command_buffer_compatible,
            self.input_layouts,
            self.output_layouts,
        )

    @functools.cached_property
    def eager_state(self) -> EagerState:
        """Kept for eager calls. It has no programs of its own on the platforms where a plan makes them: no cycle of owners."""
        return eager_state(self.body)

    @property
    def description(self) -> str:
        return f"{self.body.description} {self.spec(())}"


NativePlan = LaunchPlan | TypedPlan
Plan = NativePlan | PythonPlan

# `run(*operands, result_avals=...)` calls the kernel.
Run = Callable[..., Sequence[Any]]
