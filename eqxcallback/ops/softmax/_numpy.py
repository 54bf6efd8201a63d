"""Softmax."""

from types import ModuleType

import numpy as np

from ...kernel import PythonKernel
from .._numpy import XpArray, on_arrays, store, wide


@on_arrays
def softmax(xp: ModuleType, out: XpArray, x: XpArray, mask: XpArray | None = None, *, scale: float) -> None:
    """The axes of the mask are the last ones of those of `x`."""
    if x.size == 0:
        return
    z = -wide(x) if scale < 0 else wide(x)
    z = z if mask is None else xp.where(mask, z, xp.full_like(z, -np.inf))
    powers = xp.exp(abs(scale) * (z - z.max(axis=-1, keepdims=True)))
    powers = powers if mask is None else xp.where(mask, powers, xp.zeros_like(z))
    y = powers / powers.sum(axis=-1, keepdims=True)
    store(out, y if mask is None else xp.where(mask, y, xp.zeros_like(z)))


SOFTMAX = PythonKernel(softmax, only_if_chosen=True)
