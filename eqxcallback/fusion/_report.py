"""The report on each layer: replaced, or left alone and why."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ..core import PyTree
from ._rules import FuseRule


@dataclasses.dataclass(frozen=True)
class Change:
    """One layer of a model.

    **Attributes:**

    - `path`: where it is, as `jax.tree_util.keystr` writes it.
    - `source`: its class.
    - `target`: the class of the layer in its place, or `None` if it was left alone.
    - `reason`: why it was left alone.
    - `parameters`: how many numbers its arrays have, without those of the layers in it.
    - `rule`: whose rule replaced it, or left it alone: the caller's, or that of a package, by its name. Nothing for our own.
    """

    path: str
    source: str
    target: str | None = None
    reason: str = ""
    parameters: int = 0
    rule: str = ""

    def __str__(self) -> str:
        text = f"{self.source} -> {self.target}" if self.target else f"{self.source} left alone: {self.reason}"
        return text + (f" ({self.rule})" if self.rule else "")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FusionReport:
    """The result of [`eqxcallback.fuse`][]: printed, it has a line for each layer, or for all layers that differ only in the
    indices of their paths.

    **Attributes:**

    - `changes`: a `Change` for each layer that was replaced, or left alone for a reason.
    - `error`: how far the results of the example differ, in units of the tolerance, if there was one.
    - `parameters`: how many numbers the arrays of the model have.
    - `rules`: the `FuseRule`s that were followed, with which `unfuse` undoes them.
    """

    changes: tuple[Change, ...]
    error: float | None = None
    parameters: int = 0
    rules: tuple[FuseRule, ...] = ()

    @property
    def replaced(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.target is not None)

    @property
    def left_alone(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.target is None)

    @property
    def by_rules(self) -> str:
        """Say what rules replaced, for an error."""
        texts = dict.fromkeys(str(change) for change in self.replaced if change.rule)
        return f" Rules replaced {', '.join(texts)}." if texts else ""

    def __str__(self) -> str:
        head = f"fuse: {_count(len(self.replaced), 'layer')} replaced, {len(self.left_alone)} left alone"
        if untouched := self._share(self.left_alone):
            head += f" ({untouched})"
        if self.error is not None:
            head += f"; the example differs by {self.error:.2g} of the tolerance"
        groups: dict[tuple[str, str], list[Change]] = {}
        for change in self.changes:
            groups.setdefault((re.sub(r"\[\d+\]", "[*]", change.path), str(change)), []).append(change)
        lines = [self._line(path, changes) for (path, _), changes in groups.items()]
        width = max((len(path) for path, _ in lines), default=0)
        return "\n".join([head, *(f"  {path:<{width}}  {text}" for path, text in lines)])

    def _line(self, path: str, changes: list[Change]) -> tuple[str, str]:
        times = f"{len(changes)} x " if len(changes) > 1 else ""
        share = "" if changes[0].target else self._share(changes)
        return (path if times else changes[0].path) or "(the model)", times + str(changes[0]) + (
            share and f" ({share})"
        )

    def _share(self, changes: Sequence[Change]) -> str:
        """Say how many parameters `changes` have; `""` if they have none."""
        count = sum(change.parameters for change in changes)
        return f"{_count(count, 'parameter')}, {100 * count / self.parameters:.3g}%" if count else ""


class Fused(NamedTuple):
    """A model with fused layers, and the report. It unpacks as a pair, and can itself be used as the model: it calls it, and
    has its attributes. Indices, the length, `count` and `index` are those of the pair."""

    model: PyTree
    report: FusionReport

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
