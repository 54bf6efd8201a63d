"""The bodies of Python kernels as XLA calls them: on flat buffers, of which they make what the user's function takes."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .. import xla
from ..core import OwnCallable, PyTree, callable_name, identity
from ._options import Options
from ._structure import Structure


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Body(OwnCallable):
    """Hashable, and equal for bodies that do the same: programs compare them."""

    function: Callable[..., None]
    inputs: Structure
    outputs: Structure
    options: Options

    def _identity(self) -> object:
        return type(self), identity(self.function), *self._others()

    def __repr__(self) -> str:
        module, name = getattr(self.function, "__module__", ""), callable_name(self.function)
        return f"{type(self).__name__}({module}.{name}, {', '.join(map(repr, self._others()))})"

    def _others(self) -> list[Any]:
        return [getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "function"]

    def _named_like(self) -> Callable[..., None] | str:
        return self.function


class Forward(Body):
    """Calls `function(ctx, out, *args, **options)`."""

    def __call__(self, ctx: xla.ExecutionContext, outputs: Sequence[xla.Buffer], inputs: Sequence[xla.Buffer]) -> None:
        args = self.inputs.fast_build(inputs)
        return self.function(ctx, self.outputs.fast_build(outputs), *args, **self.options.values)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Backward(Body):
    """Calls `function(ctx, grads, args, out, cotangents, **options)`. `results` is the tree of the results alone, `outputs`
    with the residuals.
    """

    results: Structure
    needs_grad: tuple[int, ...]

    def trees(self, outputs: Sequence[object], inputs: Sequence[object]) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        n, m = self.inputs.num_arrays, self.outputs.num_arrays
        wanted = dict(zip(self.needs_grad, outputs, strict=True))
        grads = self.inputs.build_alone([wanted.get(i) for i in range(n)])
        args, out = self.inputs.build(inputs[:n]), self.outputs.build(inputs[n : n + m])
        return grads, args, out, self.results.build(inputs[n + m :])

    def __call__(self, ctx: xla.ExecutionContext, outputs: Sequence[xla.Buffer], inputs: Sequence[xla.Buffer]) -> None:
        as_gradients(outputs)
        return self.function(ctx, *self.trees(outputs, inputs), **self.options.values)


def as_gradients(outputs: Sequence[xla.Buffer]) -> None:
    """Make `write` of these Buffers sum over axes that the primals lack."""
    for grad in outputs:
        grad._is_gradient = True
