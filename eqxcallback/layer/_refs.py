"""`jax.Ref`s among the arguments of a layer: arrays that its kernel changes in place."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import xla
from ..core import OwnCallable, Value, identity


def indices(arrays: Sequence[Value], who: str) -> tuple[int, ...]:
    positions = tuple(i for i, array in enumerate(arrays) if isinstance(array, jax.Ref))
    if len({id(arrays[i]) for i in positions}) < len(positions):
        raise ValueError(f"{who}: expected each jax.Ref once among the arguments of a call; got one twice.")
    return positions


def new(arrays: Sequence[Value], refs: Sequence[int]) -> Sequence[Any]:
    """`arrays` with a Ref of its own in place of each of `refs`, for JAX code that changes them."""
    return [jax.new_ref(array) if i in refs else array for i, array in enumerate(arrays)]


@dataclasses.dataclass(frozen=True, eq=False)
class WithRefs(OwnCallable):
    """A body whose operands `refs` are results: what it changes of them, it changes there. They come after `num_results`."""

    body: Callable[..., Any]
    refs: tuple[int, ...]
    num_results: int

    def _identity(self) -> object:
        return WithRefs, identity(self.body), self.refs, self.num_results

    def _named_like(self) -> Any:
        return self.body

    def __call__(self, ctx: xla.ExecutionContext, outputs: Sequence[xla.Buffer], inputs: Sequence[xla.Buffer]) -> None:
        first, last = self.num_results, self.num_results + len(self.refs)
        operands = list(inputs)
        for i, buffer in zip(self.refs, outputs[first:last], strict=True):
            operands[i] = buffer
        return self.body(ctx, (*outputs[:first], *outputs[last:]), operands)
