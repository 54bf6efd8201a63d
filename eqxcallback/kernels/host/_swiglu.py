"""The gated activations of feed-forward blocks. Packed is where gate and up are one array."""

import importlib
import math
from typing import Any

from ._arrays import on_arrays, store, wide


@on_arrays
def swiglu(xp: Any, out: Any, gate: Any, up: Any = None) -> None:
    gate, up = _halves(gate, up)
    store(out, gate / (1 + xp.exp(-gate)) * up)


@on_arrays
def geglu(xp: Any, out: Any, gate: Any, up: Any = None, *, approximate: bool) -> None:
    gate, up = _halves(gate, up)
    if approximate:
        twice = 1 + xp.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    else:
        special = importlib.import_module(f"{'' if xp.__name__ == 'numpy' else 'cupyx.'}scipy.special")
        twice = special.erfc(-math.sqrt(0.5) * gate)
    store(out, 0.5 * gate * twice * up)


def _halves(gate: Any, up: Any) -> tuple[Any, Any]:
    if up is None:
        half = gate.shape[-1] // 2
        gate, up = gate[..., :half], gate[..., half:]
    return wide(gate), wide(up)
