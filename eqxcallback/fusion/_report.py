"""What became of each layer."""

import dataclasses
from typing import Any, NamedTuple

import jax


@dataclasses.dataclass(frozen=True)
class Change:
    """One layer of a model.

    **Attributes:**

    - `path`: where it is, as `jax.tree_util.keystr` writes it.
    - `source`: its class.
    - `target`: the class of the layer in its place, or `None` if it was left alone.
    - `reason`: why it was left alone.
    """

    path: str
    source: str
    target: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}" if self.target else f"{self.source} left alone: {self.reason}"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FusionReport:
    """What [`eqxcallback.fuse`][] did: printed, a line for each layer.

    **Attributes:**

    - `changes`: a `Change` for each layer that was replaced, or left alone for a reason.
    - `error`: how far the results of the example differ, in units of the tolerance, if there was one.
    """

    changes: tuple[Change, ...]
    error: float | None = None

    @property
    def replaced(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.target is not None)

    @property
    def left_alone(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.target is None)

    def __str__(self) -> str:
        head = f"fuse: {_count(len(self.replaced), 'layer')} replaced, {len(self.left_alone)} left alone"
        if self.error is not None:
            head += f"; the example differs by {self.error:.2g} of the tolerance"
        width = max((len(change.path) for change in self.changes), default=0)
        return "\n".join([head, *(f"  {change.path:<{width}}  {change}" for change in self.changes)])


class Fused(NamedTuple):
    """A model with fused layers, and the report. It unpacks as a pair, and can itself be used as the model: it calls it, and
    has its attributes."""

    model: Any
    report: FusionReport

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
