"""Which of our layers stands for which of Equinox's."""

from typing import Any

import equinox as eqx

from .. import nn


FUSED: dict[type, type] = {
    getattr(eqx.nn, name): getattr(nn, name)
    for name in (
        "Embedding",
        "GroupNorm",
        "GRUCell",
        "LayerNorm",
        "Linear",
        "LSTMCell",
        "MLP",
        "MultiheadAttention",
        "RMSNorm",
        "RotaryPositionalEmbedding",
    )
}
PLAIN: dict[type, type] = {ours: theirs for theirs, ours in FUSED.items()}


def reason_to_leave(node: Any) -> str | None:
    """Why a layer of Equinox's is left alone, `""` if it is not, and `None` for what is no such layer."""
    cls = type(node)
    if cls in FUSED:
        return ""
    if cls in PLAIN or not isinstance(node, eqx.Module):
        return None
    if isinstance(node, tuple(FUSED)):
        return "a subclass, which may do something else"
    if cls.__module__.startswith("equinox.nn.") and any(eqx.is_inexact_array(value) for value in vars(node).values()):
        return "there is no fused layer for it"
    return None


def title(cls: type) -> str:
    """As users write it."""
    return f"{cls.__module__.split('._')[0]}.{cls.__qualname__}"
