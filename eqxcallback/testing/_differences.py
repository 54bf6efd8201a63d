"""Central differences, and where they mean something."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._findings import scale_of


@dataclasses.dataclass(frozen=True)
class Slope:
    """The slope of one result along a direction.

    **Attributes:**

    - `allowed`: how far an exact derivative may be from `value`.
    - `smooth`: where differences of two steps agree. Elsewhere there is a kink or a jump, and `value` means nothing.
    """

    value: np.ndarray
    allowed: np.ndarray
    smooth: np.ndarray


def differences(
    function: Callable[[np.ndarray], Sequence[np.ndarray]], at: np.ndarray, direction: np.ndarray
) -> list[Slope]:
    eps = float(np.finfo(at.dtype).eps)
    size = float(np.sqrt(np.mean(np.abs(at.astype(np.complex128)) ** 2))) if at.size else 0.0
    # The truncation errs by step**2, the rounding by eps / step.
    step = eps ** (1 / 3) * (size or 1.0)
    coarse, fine = (_central(function, at, direction, h) for h in (step, step / 2))
    slopes = []
    for (a, _), (b, values) in zip(coarse, fine, strict=True):
        rounding = 16 * eps * scale_of(values) / step
        allowed = 4 * eps ** (1 / 3) * scale_of(b) + rounding
        smooth = np.asarray(np.isfinite(a) & np.isfinite(b) & (np.abs(a - b) <= allowed))
        slopes.append(Slope(np.where(smooth, (4 * b - a) / 3, 0), np.full(b.shape, allowed), smooth))
    return slopes


def _central(function: Any, at: np.ndarray, direction: np.ndarray, step: float) -> list[tuple[Any, Any]]:
    """The slopes and the values, wide."""
    up = np.asarray(at + (step * direction).astype(at.dtype), at.dtype)
    down = np.asarray(at - (step * direction).astype(at.dtype), at.dtype)
    slopes = []
    with np.errstate(invalid="ignore"):
        for a, b in zip(function(up), function(down), strict=True):
            wide = np.complex128 if a.dtype.kind == "c" else np.float64
            slopes.append(((a.astype(wide) - b.astype(wide)) / (2 * step), a.astype(wide)))
    return slopes
