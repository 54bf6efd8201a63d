"""A table of our layers and of the layers of Equinox's that they stand for."""

from collections.abc import Collection, Container

import equinox as eqx

from .. import nn
from ._parameters import of_module


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
_OURS = __name__.partition(".")[0]


def reason_to_leave(node: object, known: Collection[type], fused: Container[type]) -> str | None:
    """Why a Module is left alone, `""` if it is not, and `None` for what is not a layer, or is fused already."""
    cls = type(node)
    if cls in known:
        return ""
    if cls in fused:
        return None
    if not isinstance(node, eqx.Module) or any(base.__module__.partition(".")[0] == _OURS for base in cls.__mro__):
        return None
    if isinstance(node, tuple(known)):
        return "a subclass, which may do something else"
    return "there is no fused layer for it" if of_module(node) else None


def title(cls: type) -> str:
    """Return the name of a class as users write it."""
    return f"{cls.__module__.split('._')[0]}.{cls.__qualname__}"
