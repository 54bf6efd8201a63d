"""The kernels of a layer as XLA calls them: on flat buffers, of which they make the layer and its arguments."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _errors
from ..op import Backward, Body


def _call_or_poison(body: Body, on_error: str, outputs: Sequence[Any], call: Any) -> None:
    if on_error == "raise":
        return call()
    try:
        result = call()
        if result is not None:
            raise ValueError(f"a kernel must return None; got {type(result).__name__}")
    except Exception as error:
        # The peers of this device may be waiting for it, in a collective that an error would never reach.
        for out in outputs:
            poison(out)
        _errors.record_poison(error, _errors.callable_name(body.function))


def poison(out: Any) -> None:
    """NaN, or zero where there is none."""
    array = out.numpy()
    kind = array.dtype.kind
    has_nan = kind in "fc" or (kind == "V" and "int" not in array.dtype.name)
    try:
        array[...] = np.asarray(np.nan if has_nan else 0).astype(array.dtype)
    except (TypeError, ValueError):
        array[...] = np.zeros((), array.dtype)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LayerForward(Body):
    """Calls `function(self, ctx, out, *args, **kwargs)`."""

    on_error: str

    def __call__(self, ctx: Any, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        layer, args, kwargs = self.inputs.fast_build(inputs)
        out = self.outputs.fast_build(outputs)
        if self.on_error == "raise":  # spares a function: this is called often
            return self.function(layer, ctx, out, *args, **kwargs)
        return _call_or_poison(self, self.on_error, outputs, lambda: self.function(layer, ctx, out, *args, **kwargs))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KernelForward(LayerForward):
    """Of a `PythonKernel`: calls `function(ctx, out, self, *args, **kwargs)`."""

    def __call__(self, ctx: Any, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        layer, args, kwargs = self.inputs.fast_build(inputs)
        out = self.outputs.fast_build(outputs)
        return _call_or_poison(self, self.on_error, outputs, lambda: self.function(ctx, out, layer, *args, **kwargs))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LayerBackward(Backward):
    """Calls `function(self, ctx, grads, args, out, cotangents)`. `grads` has the tree of `(self, *args)`, where keyword-only
    arguments come last.
    """

    on_error: str
    keywords: tuple[str, ...]

    def __call__(self, ctx: Any, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        (d_layer, d_args, d_kwargs), (layer, args, kwargs), out, cotangents = self.trees(outputs, inputs)
        grads = (d_layer, *d_args, *(d_kwargs[name] for name in self.keywords))
        args = (*args, *(kwargs[name] for name in self.keywords))
        return _call_or_poison(
            self,
            self.on_error,
            outputs,
            lambda: self.function(layer, ctx, grads, args, out, cotangents),
        )
