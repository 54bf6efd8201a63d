"""Attention: a block of queries and a block of keys at a time, so that no array has queries times keys."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from ...core import PyTree
from ...kernel import PythonKernel
from .._numpy import XpArray, finite, on_arrays, store, wide
from ._numpy_dropout import kept as rows_kept
from ._operands import is_of_keys


_QUERIES, _KEYS = 64, 512  # in a block


def attend(
    xp: ModuleType,
    out: XpArray,
    q: XpArray,
    kv: PyTree,
    bias: XpArray | None = None,
    mask: XpArray | None = None,
    alibi_slopes: XpArray | None = None,
    query_segments: XpArray | None = None,
    key_segments: XpArray = None,
    lengths: XpArray | None = None,
    offset: XpArray | None = None,
    dropout_keys: XpArray | None = None,
    kept: XpArray | None = None,
    *,
    causal: bool,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    dropout: float = 0.0,
    lse: XpArray | None = None,
) -> None:
    """The axes of operands are the last ones of those of `q`: all are aligned at the right end."""
    queries, keys = q.shape[-3], kv[0].shape[-3]
    if lengths is not None:  # whatever else is there: a weight of zero would not hide NaN
        filled = xp.arange(keys)[:, None, None] < lengths[..., None, None, None]
        kv = tuple(xp.where(filled, array, xp.zeros_like(array)) for array in kv)
    before = keys - queries if offset is None else offset[..., None, None, None]
    for start in range(0, queries, _QUERIES):
        stop = min(start + _QUERIES, queries)
        rows, index = slice(start, stop), xp.arange(start, stop)

        def rows_of(x: XpArray, rows: slice = rows) -> slice:
            return slice(None) if is_of_keys(x, queries) else rows

        def logits_of(logits: XpArray, columns: slice, rows: slice = rows, index: XpArray = index) -> XpArray:
            key = xp.arange(columns.start, columns.stop)
            away = index[:, None] + before - key
            if soft_cap:
                logits = soft_cap * xp.tanh(logits / soft_cap)
            if bias is not None:
                logits = logits + bias[..., rows_of(bias), columns].astype(logits.dtype)
            if alibi_slopes is not None:
                slopes = alibi_slopes[..., None, None].astype(logits.dtype)
                logits = logits - slopes * xp.abs(away).astype(logits.dtype)
            seen = [away >= 0] if causal else []
            if window:
                seen += [away < window] if causal else [away < window, away > -window]
            if mask is not None:
                seen.append(mask[..., rows_of(mask), columns])
            if query_segments is not None:
                seen.append(query_segments[..., None, rows, None] == key_segments[..., None, None, columns])
            if lengths is not None:
                seen.append(key < lengths[..., None, None, None])
            for visible in seen:
                logits = xp.where(visible, logits, -np.inf)
            return logits

        def dropped(weights: XpArray, columns: slice, rows: slice = rows, index: XpArray = index) -> XpArray:
            if kept is not None:
                stays = kept[..., rows, columns]
            else:
                stays = rows_kept(dropout_keys, index, xp.arange(columns.start, columns.stop), keys, dropout)
            return xp.where(stays, weights / (1 - dropout), 0.0)

        last = keys
        if causal and offset is None:
            last = min(last, max(stop + keys - queries, 0))
        part, sums = _attend(xp, q[..., rows, :, :], kv, last, logits_of, dropped if dropout else None, scale)
        store(out[..., rows, :, :], part)
        if lse is not None:
            store(lse[..., rows, :], sums)


@on_arrays
def attention(xp: ModuleType, results: PyTree, *args: object, **options: object) -> None:
    out, lse = results
    attend(xp, out, *args, lse=lse, **options)


@on_arrays
def decode_attention(
    xp: ModuleType,
    out: XpArray,
    q: XpArray,
    kv: PyTree,
    length: XpArray,
    alibi_slopes: XpArray | None = None,
    k_scale: XpArray | None = None,
    v_scale: XpArray = None,
    **options: Any,
) -> None:
    """The query is at the position of the last entry. With scales, keys and values are int8."""
    filled = min(kv[0].shape[-3], max(int(length.max()), 0)) if length.size else 0
    length = xp.clip(length, 0, kv[0].shape[-3])
    kv = tuple(array[..., :filled, :, :] for array in kv)
    if k_scale is not None:
        scales = (array[..., :filled, :, None] for array in (k_scale, v_scale))
        kv = tuple(x.astype(scale.dtype) * scale for x, scale in zip(kv, scales, strict=True))
    # A single example sees all of these.
    places = {"lengths": length if length.size > 1 else None, "offset": length - 1}
    one = (out[..., None, :, :], q[..., None, :, :])
    attend(xp, *one, kv, alibi_slopes=alibi_slopes, causal=False, **places, **options)


def _attend(
    xp: ModuleType,
    q: XpArray,
    kv: PyTree,
    last: int,
    logits_of: Callable[[XpArray, slice], XpArray],
    dropped: Callable[[XpArray, slice], XpArray] | None,
    scale: float,
) -> tuple[XpArray, XpArray]:
    """Return the result and the log-sum-exp of some queries over the first `last` keys. Both functions take logits of shape
    `(*batch, heads, queries, keys)`, and the keys.
    """
    k, v = (xp.swapaxes(array, -2, -3)[..., None, :, :] for array in kv)  # kv_heads, 1, keys, size
    *batch, queries, heads, size = q.shape
    kv_heads = k.shape[-4]
    group = (*batch, kv_heads, heads // kv_heads, queries)
    rows = xp.moveaxis((wide(q) * scale).reshape(*batch, queries, *group[-3:-1], size), -4, -2)
    sums = xp.zeros_like(rows)
    total = xp.zeros((*group, 1), rows.dtype)
    highest = total - np.inf
    for first in range(0, last, _KEYS):
        columns = slice(first, min(first + _KEYS, last))
        width = columns.stop - first
        logits = rows @ xp.swapaxes(wide(k[..., columns, :]), -1, -2)
        logits = logits_of(logits.reshape(*batch, heads, queries, width), columns).reshape(*group, width)
        higher = xp.maximum(highest, logits.max(axis=-1, keepdims=True))
        shift = finite(higher, xp)
        weights, before = xp.exp(logits - shift), xp.exp(highest - shift)
        total = total * before + weights.sum(axis=-1, keepdims=True)
        if dropped is not None:
            weights = dropped(weights.reshape(*batch, heads, queries, width), columns).reshape(*group, width)
        sums = sums * before + weights @ wide(v[..., columns, :])
        highest = higher
    # A query that sees nothing gives zeros, and -inf.
    nothing, total = total == 0, xp.where(total == 0, xp.ones_like(total), total)
    lse = xp.where(nothing, -np.inf, finite(highest, xp) + xp.log(total)).reshape(*batch, heads, queries)
    return xp.moveaxis(sums / total, -2, -4).reshape(q.shape), xp.swapaxes(lse, -1, -2)


ATTENTION = PythonKernel(attention, only_if_chosen=True)
DECODE_ATTENTION = PythonKernel(decode_attention, only_if_chosen=True)
