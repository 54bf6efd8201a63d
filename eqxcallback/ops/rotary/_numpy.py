"""Rotary position embedding."""

from typing import Any

from ...kernel import PythonKernel
from .._numpy import on_arrays, store, wide


@on_arrays
def rotary_embedding(xp: Any, out: Any, x: Any, table: Any) -> None:
    """The axes of the table are the last ones of those of `x`."""
    half = x.shape[-1] // 2
    cos, sin = (each[..., :, None, :] for each in table)
    a, b = wide(x[..., :half]), wide(x[..., half:])
    store(out[..., :half], a * cos - b * sin)
    store(out[..., half:], b * cos + a * sin)


ROTARY_EMBEDDING = PythonKernel(rotary_embedding, only_if_chosen=True)
