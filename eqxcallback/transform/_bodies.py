"""The bodies of Python kernels as XLA calls them: on flat buffers, of which they make what the user's function takes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.tree_util import tree_flatten_with_path

from .. import xla
from ..core import OwnCallable, PyTree, callable_name, identity, path_text
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

    def call(self, ctx: xla.ExecutionContext, outputs: Sequence[object], inputs: Sequence[object]) -> object:
        """Call the user's function, and return what it returns."""
        return self.function(ctx, *self.trees(outputs, inputs), **self.options.values)

    def gradient_tree(self, outputs: Sequence[object], inputs: Sequence[object]) -> PyTree:
        """Return what the user's function gets as `grads`."""
        return self.trees(outputs, inputs)[0]

    def _gradients(self) -> tuple[str, Mapping[int, str]]:
        nothing = [None] * (self.inputs.num_arrays + self.outputs.num_arrays + self.results.num_arrays)
        grads = self.gradient_tree(range(len(self.needs_grad)), nothing)
        return self._who(), {i: path_text("grads", path) for path, i in tree_flatten_with_path(grads)[0]}

    def _who(self) -> str:
        return callable_name(self.function)

    def __call__(self, ctx: xla.ExecutionContext, outputs: Sequence[xla.Buffer], inputs: Sequence[xla.Buffer]) -> None:
        for grad in outputs:
            grad._is_gradient = True  # its `write` sums over axes that the primal lacks
        result = self.call(ctx, outputs, inputs)
        if result is not None:
            who, names = self._gradients()
            raise ValueError(
                f"{who} must return None, because gradients are what it writes; got {type(result).__name__}. Write each Buffer "
                f"in grads: {', '.join(names.values())}."
            )
