"""Layouts of arrays in memory: axes from major to minor, as `jax.ffi.ffi_call` has them, or `None` for row-major."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core import Aval


Layouts = Sequence[Sequence[int] | None]


def full_layouts(layouts: Layouts | None, avals: Sequence[Aval]) -> list[tuple[int, ...]] | None:
    """One for each array. Those axes that `vmap` has put in front are the most major ones."""
    if layouts is None:
        return None
    full = []
    for layout, aval in zip(layouts, avals, strict=True):
        front = 0 if layout is None else aval.ndim - len(layout)
        full.append((*range(front), *(front + axis for axis in (range(aval.ndim) if layout is None else layout))))
    return full


def minor_to_major(layouts: list[tuple[int, ...]] | None) -> list[tuple[int, ...]] | None:
    """Return layouts as `jax.ffi.ffi_lowering` has them, from minor to major."""
    return None if layouts is None else [layout[::-1] for layout in layouts]


def layouts_attribute(
    inputs: list[tuple[int, ...]] | None,
    outputs: list[tuple[int, ...]] | None,
    avals: tuple[Sequence[Any], Sequence[Any]],
) -> dict[str, np.ndarray]:
    """Return the layouts that buffers of the python lane need: of all outputs, then of all inputs. `{}` if all are row-major."""
    if inputs is None and outputs is None:
        return {}
    given = [(outputs, avals[1]), (inputs, avals[0])]
    known = [layouts or [tuple(range(aval.ndim)) for aval in side] for layouts, side in given]
    return {"layouts": np.array([axis for layouts in known for layout in layouts for axis in layout], np.int64)}
