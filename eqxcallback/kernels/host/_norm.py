"""Norms of the last axis, or of groups of channels."""

from typing import Any

from ._arrays import on_arrays, store, wide


@on_arrays
def rms_norm(xp: Any, out: Any, x: Any, weight: Any = None, *, eps: float) -> None:
    store(out, _rms_norm(xp, wide(x), weight, eps))


@on_arrays
def add_rms_norm(xp: Any, out: Any, x: Any, residual: Any, weight: Any = None, *, eps: float) -> None:
    """The sum starts as the residual."""
    norm, total = out
    store(total, wide(x) + wide(residual))
    store(norm, _rms_norm(xp, wide(total), weight, eps))


@on_arrays
def layer_norm(xp: Any, out: Any, x: Any, weight: Any = None, bias: Any = None, *, eps: float) -> None:
    store(out, _affine(_layer_norm(xp, wide(x), eps), weight, bias))


@on_arrays
def group_norm(xp: Any, out: Any, x: Any, weight: Any = None, bias: Any = None, *, groups: int, eps: float) -> None:
    *batch, channels, size = x.shape
    y = _layer_norm(xp, wide(x).reshape(*batch, groups, channels // groups * size), eps).reshape(x.shape)
    store(out, _affine(y, *(None if each is None else each[:, None] for each in (weight, bias))))


def _rms_norm(xp: Any, x: Any, weight: Any, eps: float) -> Any:
    x, eps = _squarable(xp, x, eps)
    return _affine(x / xp.sqrt(_mean(xp, xp.square(x)) + eps), weight, None)


def _layer_norm(xp: Any, x: Any, eps: float) -> Any:
    x, eps = _squarable(xp, x, eps)
    x = x - _mean(xp, x)
    return x / xp.sqrt(_mean(xp, xp.square(x)) + eps)


def _squarable(xp: Any, x: Any, eps: Any) -> tuple[Any, Any]:
    """`x` and `eps` of the same norm, whose rows have squares that do not overflow, as the reference has it."""
    highest = xp.max(xp.abs(x), axis=-1, keepdims=True, initial=0)
    large = (highest > 2.0**40) & xp.isfinite(highest)
    power = xp.where(large, xp.frexp(highest)[1], 0)
    small = xp.maximum(xp.ldexp(xp.full_like(highest, eps), -2 * power), xp.full_like(highest, 2.0**-80))
    return xp.ldexp(x, -power), xp.where(large, small, xp.full_like(highest, eps))


def _mean(xp: Any, x: Any) -> Any:
    return xp.sum(x, axis=-1, keepdims=True) / max(x.shape[-1], 1)


def _affine(y: Any, weight: Any, bias: Any) -> Any:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
