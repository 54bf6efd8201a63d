"""The kernels of a layer as XLA calls them: on flat buffers, of which they make the layer and its arguments."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from .. import xla
from ..core import PyTree
from ..transform import Backward, Body


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LayerForward(Body):
    """Calls `function(self, ctx, out, *args, **kwargs)`."""

    layer: str

    def _named_like(self) -> str:
        return self.layer

    def __call__(self, ctx: xla.ExecutionContext, outputs: Sequence[xla.Buffer], inputs: Sequence[xla.Buffer]) -> None:
        layer, args, kwargs = self.inputs.fast_build(inputs)
        out = self.outputs.fast_build(outputs)
        return self.function(layer, ctx, out, *args, **kwargs)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KernelForward(LayerForward):
    """The forward body of a `PythonKernel`: calls `function(ctx, out, self, *args, **kwargs)`."""

    def __call__(self, ctx: xla.ExecutionContext, outputs: Sequence[xla.Buffer], inputs: Sequence[xla.Buffer]) -> None:
        layer, args, kwargs = self.inputs.fast_build(inputs)
        out = self.outputs.fast_build(outputs)
        return self.function(ctx, out, layer, *args, **kwargs)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LayerBackward(Backward):
    """Calls `function(self, ctx, grads, args, out, cotangents)`. `grads` has the tree of `(self, *args)`, where keyword-only
    arguments come last.
    """

    layer: str
    keywords: tuple[str, ...]

    def _named_like(self) -> str:
        return self.layer

    def arguments(self, outputs: Sequence[object], inputs: Sequence[object]) -> tuple[Any, ...]:
        """The layer, and `grads, args, out, cotangents`."""
        (d_layer, d_args, d_kwargs), (layer, args, kwargs), out, cotangents = self.trees(outputs, inputs)
        grads = (d_layer, *d_args, *(d_kwargs[name] for name in self.keywords))
        return layer, grads, (*args, *(kwargs[name] for name in self.keywords)), out, cotangents

    def _who(self) -> str:
        return f"{self.layer}.backward"

    def gradient_tree(self, outputs: Sequence[object], inputs: Sequence[object]) -> PyTree:
        return self.arguments(outputs, inputs)[1]

    def call(self, ctx: xla.ExecutionContext, outputs: Sequence[object], inputs: Sequence[object]) -> object:
        layer, grads, args, out, cotangents = self.arguments(outputs, inputs)
        return self.function(layer, ctx, grads, args, out, cotangents)
