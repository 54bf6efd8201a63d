"""The kernels of a layer as XLA calls them: on flat buffers, of which they make the layer and its arguments."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import xla
from ..core import PyTree, record_poison, types_text
from ..transform import Backward, Body, as_gradients


def _call_or_poison(
    body: "LayerForward | LayerBackward",
    ctx: xla.ExecutionContext,
    outputs: Sequence[xla.Buffer],
    inputs: Sequence[xla.Buffer],
    call: Callable[[], None],
) -> None:
    if body.on_error == "raise":
        return call()
    try:
        result = call()
        if result is not None:
            raise ValueError(f"a kernel must return None; got {type(result).__name__}")
    except Exception as error:
        with ctx:
            _poison_all(body, error, outputs, inputs)


def _poison_all(
    body: "LayerForward | LayerBackward", error: Exception, outputs: Sequence[xla.Buffer], inputs: Sequence[xla.Buffer]
) -> bool:
    """Fill all outputs with poison if the layer wants that, and return whether it does. The peers of this device may be waiting
    for it, in a collective that an error would never reach.
    """
    if body.on_error == "raise":
        return False
    for out in outputs:
        poison(out)
    record_poison(error, body.layer, types_text(outputs, inputs))
    return True


def poison(out: PyTree) -> None:
    """NaN, or zero where there is none."""
    nan = np.asarray(np.nan if jnp.issubdtype(out.dtype, jnp.inexact) else 0).astype(out.dtype)
    value = nan if nan != nan else np.zeros((), out.dtype)
    (out.cupy() if hasattr(out, "__cuda_array_interface__") else out.numpy())[...] = value


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LayerForward(Body):
    """Calls `function(self, ctx, out, *args, **kwargs)`."""

    layer: str
    on_error: str

    def _named_like(self) -> str:
        return self.layer

    def _takes(self, error: Exception, outputs: Sequence[xla.Buffer], inputs: Sequence[xla.Buffer]) -> bool:
        return _poison_all(self, error, outputs, inputs)

    def __call__(self, ctx: xla.ExecutionContext, outputs: Sequence[xla.Buffer], inputs: Sequence[xla.Buffer]) -> None:
        layer, args, kwargs = self.inputs.fast_build(inputs)
        out = self.outputs.fast_build(outputs)
        if self.on_error == "raise":  # spares a function: this is called often
            return self.function(layer, ctx, out, *args, **kwargs)
        return _call_or_poison(self, ctx, outputs, inputs, lambda: self.function(layer, ctx, out, *args, **kwargs))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KernelForward(LayerForward):
    """The forward body of a `PythonKernel`: calls `function(ctx, out, self, *args, **kwargs)`."""

    def __call__(self, ctx: xla.ExecutionContext, outputs: Sequence[xla.Buffer], inputs: Sequence[xla.Buffer]) -> None:
        layer, args, kwargs = self.inputs.fast_build(inputs)
        out = self.outputs.fast_build(outputs)
        return _call_or_poison(self, ctx, outputs, inputs, lambda: self.function(ctx, out, layer, *args, **kwargs))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LayerBackward(Backward):
    """Calls `function(self, ctx, grads, args, out, cotangents)`. `grads` has the tree of `(self, *args)`, where keyword-only
    arguments come last.
    """

    layer: str
    on_error: str
    keywords: tuple[str, ...]

    def _named_like(self) -> str:
        return self.layer

    def _takes(self, error: Exception, outputs: Sequence[xla.Buffer], inputs: Sequence[xla.Buffer]) -> bool:
        return _poison_all(self, error, outputs, inputs)

    def arguments(self, outputs: Sequence[object], inputs: Sequence[object]) -> tuple[Any, ...]:
        """The layer, and `grads, args, out, cotangents`."""
        (d_layer, d_args, d_kwargs), (layer, args, kwargs), out, cotangents = self.trees(outputs, inputs)
        grads = (d_layer, *d_args, *(d_kwargs[name] for name in self.keywords))
        return layer, grads, (*args, *(kwargs[name] for name in self.keywords)), out, cotangents

    def __call__(self, ctx: xla.ExecutionContext, outputs: Sequence[xla.Buffer], inputs: Sequence[xla.Buffer]) -> None:
        as_gradients(outputs)
        layer, grads, args, out, cotangents = self.arguments(outputs, inputs)
        return _call_or_poison(
            self, ctx, outputs, inputs, lambda: self.function(layer, ctx, grads, args, out, cotangents)
        )
