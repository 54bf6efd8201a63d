"""A kernel that fails, in a layer with `on_error = "poison"`: its results are poison, and the program goes on."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import xla
from ..core import OwnCallable, PyTree, callable_name, identity, record_poison, types_text


@dataclasses.dataclass(frozen=True, eq=False)
class Poisoning(OwnCallable):
    """`body`, with poison in all that it writes, a `jax.Ref`'s value too, in place of an error. The peers of this device may be
    waiting for it, in a collective that an error would never reach.
    """

    body: Callable[..., Any]

    def _identity(self) -> object:
        return Poisoning, identity(self.body)

    def _named_like(self) -> Any:
        return self.body

    def _gradients(self) -> tuple[str, Mapping[int, str]] | None:
        return self.body._gradients() if isinstance(self.body, OwnCallable) else None

    def _takes(self, error: Exception, outputs: Sequence[xla.Buffer], inputs: Sequence[xla.Buffer]) -> bool:
        for out in outputs:
            poison(out)
        record_poison(error, callable_name(self.body), types_text(outputs, inputs))
        return True

    def __call__(self, ctx: xla.ExecutionContext, outputs: Sequence[xla.Buffer], inputs: Sequence[xla.Buffer]) -> None:
        try:
            result = self.body(ctx, outputs, inputs)
            if result is not None:
                raise ValueError(f"a kernel must return None; got {type(result).__name__}")
        except Exception as error:
            with ctx:
                self._takes(error, outputs, inputs)


def poison(out: PyTree) -> None:
    """Fill `out` with NaN, or with zeros if its dtype has no NaN."""
    nan = np.asarray(np.nan if jnp.issubdtype(out.dtype, jnp.inexact) else 0).astype(out.dtype)
    value = nan if nan != nan else np.zeros((), out.dtype)
    (out.cupy() if hasattr(out, "__cuda_array_interface__") else out.numpy())[...] = value
