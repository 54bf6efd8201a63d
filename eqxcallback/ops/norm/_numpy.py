"""Norms of the last axis, or of groups of channels."""

from types import ModuleType

from ...kernel import PythonKernel
from .._numpy import XpArray, on_arrays, store, wide


@on_arrays
def norm(
    xp: ModuleType,
    out: XpArray,
    x: XpArray,
    weight: XpArray | None = None,
    bias: XpArray | None = None,
    *,
    eps: float,
    center: bool,
) -> None:
    store(out, _affine(_norm(xp, wide(x), eps, center), weight, bias))


@on_arrays
def add_rms_norm(
    xp: ModuleType,
    out: XpArray,
    x: XpArray,
    residual: XpArray,
    weight: XpArray | None = None,
    *,
    eps: float,
) -> None:
    """The sum starts as the residual."""
    normalized, total = out
    store(total, wide(x) + wide(residual))
    store(normalized, _affine(_norm(xp, wide(total), eps, center=False), weight, None))


@on_arrays
def group_norm(
    xp: ModuleType,
    out: XpArray,
    x: XpArray,
    weight: XpArray | None = None,
    bias: XpArray | None = None,
    *,
    groups: int,
    eps: float,
) -> None:
    *batch, channels, size = x.shape
    y = _norm(xp, wide(x).reshape(*batch, groups, channels // groups * size), eps, center=True).reshape(x.shape)
    store(out, _affine(y, *(None if array is None else array[:, None] for array in (weight, bias))))


def _norm(xp: ModuleType, x: XpArray, eps: float, center: bool) -> XpArray:
    x, eps = _squarable(xp, x, eps)
    x = x - _mean(xp, x) if center else x
    return x / xp.sqrt(_mean(xp, xp.square(x)) + eps)


def _squarable(xp: ModuleType, x: XpArray, eps: XpArray) -> tuple[XpArray, XpArray]:
    """`x` and `eps` of the same norm, whose rows have squares that do not overflow, as the reference has it."""
    if x.shape[-1] == 0:  # has no highest
        return x, eps
    highest = xp.max(xp.abs(x), axis=-1, keepdims=True)
    large = (highest > 2.0**40) & xp.isfinite(highest)
    power = xp.where(large, xp.frexp(highest)[1], 0)
    small = xp.maximum(xp.ldexp(xp.full_like(highest, eps), -2 * power), xp.full_like(highest, 2.0**-80))
    return xp.ldexp(x, -power), xp.where(large, small, xp.full_like(highest, eps))


def _mean(xp: ModuleType, x: XpArray) -> XpArray:
    return xp.sum(x, axis=-1, keepdims=True) / max(x.shape[-1], 1)


def _affine(y: XpArray, weight: XpArray | None, bias: XpArray | None) -> XpArray:
    y = y if weight is None else y * wide(weight)
    return y if bias is None else y + wide(bias)


ADD_RMS_NORM = PythonKernel(add_rms_norm, aliases={"residual": 1}, only_if_chosen=True)
GROUP_NORM = PythonKernel(group_norm, only_if_chosen=True)
NORM = PythonKernel(norm, only_if_chosen=True)
