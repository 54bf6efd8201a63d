"""The lowering of a kernel, which a program that calls it is lowered with."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...core import Aval, Value
from ..types import CallOptions
from ._body import CallSpec, PythonBody
from ._handles import EagerState, eager_state
from ._libraries import target_for_each


@dataclasses.dataclass(frozen=True, eq=False)
class LaunchLowering:
    """The native lane: one custom call.

    **Attributes:**

    - `target`: the name of a registered handler.
    - `attributes`: typed values, see `_attributes.py`.
    - `workspaces`: types of results after the kernel's own, which nobody reads.
    - `on_threads`: whether one call may be that for many examples, each by itself, on XLA's threads.
    """

    target: str
    attributes: Mapping[str, Any]
    options: CallOptions = dataclasses.field(default_factory=CallOptions)
    workspaces: tuple[Aval, ...] = ()
    on_threads: bool = False

    def for_each(self, mapped: Sequence[bool], size: Any, num_results: int) -> "LaunchLowering":
        """One call for so many examples.

        **Arguments:**

        - `mapped`: whether an operand has their axis in front. All results have.
        """
        flags = [*mapped, *[True] * (num_results + len(self.workspaces))]
        return dataclasses.replace(
            self,
            target=target_for_each(self.target),
            attributes={**self.attributes, "eqxcallback_examples": np.array(flags, np.int64)},
            workspaces=tuple(aval.update(shape=(size, *aval.shape)) for aval in self.workspaces),
        )

    def for_types(self, operands: Sequence[Aval], results: Sequence[Aval]) -> "LaunchLowering":
        """Return the lowering for operands and results of these types."""
        del operands, results
        return self

    @property
    def description(self) -> str:
        """The same text in each process, for lowerings that call the same."""
        return repr((self.target, dict(self.attributes), self.options))


@dataclasses.dataclass(frozen=True, eq=False)
class TypedLowering:
    """The native lane, where what is called depends on the types: `for_types(operands, results)` says it."""

    for_types: Callable[[Sequence[Aval], Sequence[Aval]], LaunchLowering]
    target: str
    describe: Callable[[], str]  # reads and hashes sources: not done before it is asked
    options: CallOptions = dataclasses.field(default_factory=CallOptions)
    on_threads: bool = False

    @property
    def description(self) -> str:
        """The same text in each process, for lowerings that call the same."""
        return self.describe()


@dataclasses.dataclass(frozen=True, eq=False)
class PythonLowering:
    """The python lane: one call of `body`."""

    body: PythonBody
    options: CallOptions = dataclasses.field(default_factory=CallOptions)
    on_threads = False
    _last: dict[str, tuple[Any, CallSpec]] = dataclasses.field(default_factory=dict)

    def spec(self, result_avals: Sequence[Aval]) -> CallSpec:
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

    function: Callable[[Sequence[Value], Sequence[Aval]], Sequence[Value]]
    describe: Callable[[], str]
    options: CallOptions = dataclasses.field(default_factory=CallOptions)
    on_threads = False

    @property
    def description(self) -> str:
        return self.describe()


NativeLowering = LaunchLowering | TypedLowering
Lowering = NativeLowering | PythonLowering | JaxLowering

# `run(*operands, result_avals=...)` calls the kernel. With `mapped`, whether each operand has an axis of examples in front, as
# all results have, XLA's threads call it for each: for lowerings that say `on_threads`.
Run = Callable[..., Sequence[Value]]
