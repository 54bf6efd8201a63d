"""The activations of feed-forward blocks, with a gate and without. Packed is where gate and up are one array."""

import importlib
import math
from types import ModuleType

from ...kernel import PythonKernel
from .._numpy import XpArray, on_arrays, store, wide


@on_arrays
def glu(xp: ModuleType, out: XpArray, gate: XpArray, up: XpArray | None = None, *, activation: str) -> None:
    gate, up = _halves(gate, up)
    store(out, _activated(xp, gate, activation) * up)


@on_arrays
def gelu(xp: ModuleType, out: XpArray, x: XpArray, *, activation: str) -> None:
    store(out, _activated(xp, wide(x), activation))


def _activated(xp: ModuleType, x: XpArray, activation: str) -> XpArray:
    if activation == "silu":
        return x / (1 + xp.exp(-x))
    if activation == "gelu_tanh":
        return 0.5 * x * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    special = importlib.import_module(f"{'' if xp.__name__ == 'numpy' else 'cupyx.'}scipy.special")
    return 0.5 * x * special.erfc(-math.sqrt(0.5) * x)


def _halves(gate: XpArray, up: XpArray | None) -> tuple[XpArray, XpArray]:
    if up is None:
        half = gate.shape[-1] // 2
        gate, up = gate[..., :half], gate[..., half:]
    return wide(gate), wide(up)


GLU, GELU = (PythonKernel(function, only_if_chosen=True) for function in (glu, gelu))
