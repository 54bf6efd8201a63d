"""What a kernel becomes when a program that calls it is lowered."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..types import CallOptions
from ._body import CallSpec, PythonBody
from ._handles import EagerState, eager_state


@dataclasses.dataclass(frozen=True, eq=False)
class LaunchLowering:
    """The native lane: one custom call.

    **Attributes:**

    - `target`: the name of a registered handler.
    - `attributes`: typed values, see `_attributes.py`.
    - `workspaces`: types of results after the kernel's own, which nobody reads.
    """

    target: str
    attributes: Mapping[str, Any]
    options: CallOptions = dataclasses.field(default_factory=CallOptions)
    workspaces: tuple[Any, ...] = ()

    def for_types(self, operands: Sequence[Any], results: Sequence[Any]) -> "LaunchLowering":
        """What is called with operands and results of these types."""
        del operands, results
        return self

    @property
    def description(self) -> str:
        """The same text in each process, for lowerings that call the same."""
        return repr((self.target, dict(self.attributes), self.options))


@dataclasses.dataclass(frozen=True, eq=False)
class TypedLowering:
    """The native lane, where what is called depends on the types: `for_types(operands, results)` says it."""

    for_types: Callable[[Sequence[Any], Sequence[Any]], LaunchLowering]
    target: str
    describe: Callable[[], str]  # reads and hashes sources: not done before it is asked
    options: CallOptions = dataclasses.field(default_factory=CallOptions)

    @property
    def description(self) -> str:
        """The same text in each process, for lowerings that call the same."""
        return self.describe()


@dataclasses.dataclass(frozen=True, eq=False)
class PythonLowering:
    """The python lane: one call of `body`."""

    body: PythonBody
    options: CallOptions = dataclasses.field(default_factory=CallOptions)
    _last: dict[str, tuple[Any, CallSpec]] = dataclasses.field(default_factory=dict)

    def spec(self, result_avals: Sequence[Any]) -> CallSpec:
        avals, spec = self._last.get("spec", (None, None))
        if spec is None or avals is not result_avals:  # eager calls mostly repeat themselves
            spec = CallSpec(tuple(result_avals), None, self.options)
            self._last["spec"] = (result_avals, spec)
        return spec

    @functools.cached_property
    def eager_state(self) -> EagerState:
        """Kept for eager calls. Where a lowering makes programs, this has none of its own: no cycle of owners."""
        return eager_state(self.body)

    @property
    def description(self) -> str:
        return f"{self.body.description} {self.spec(())}"


@dataclasses.dataclass(frozen=True, eq=False)
class JaxLowering:
    """No lane: `function(operands, result_avals)` is JAX code, which becomes part of the program."""

    function: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]
    describe: Callable[[], str]
    options: CallOptions = dataclasses.field(default_factory=CallOptions)

    @property
    def description(self) -> str:
        return self.describe()


NativeLowering = LaunchLowering | TypedLowering
Lowering = NativeLowering | PythonLowering | JaxLowering

# `run(*operands, result_avals=...)` calls the kernel.
Run = Callable[..., Sequence[Any]]
