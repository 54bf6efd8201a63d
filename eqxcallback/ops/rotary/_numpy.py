"""Rotary position embedding."""

from typing import Any

import numpy as np

from ...kernel import PythonKernel
from .._numpy import on_arrays, store, to_host, wide


@on_arrays
def rotary_embedding(xp: Any, out: Any, x: Any, table: Any) -> None:
    _rotate(out, x, table)


def _rotate(out: Any, x: Any, table: Any) -> None:
    """The axes of the table are the last ones of those of `x`."""
    half = x.shape[-1] // 2
    cos, sin = (each[..., :, None, :] for each in table)
    a, b = wide(x[..., :half]), wide(x[..., half:])
    store(out[..., :half], a * cos - b * sin)
    store(out[..., half:], b * cos + a * sin)


@on_arrays
def rotary_append(xp: Any, results: Any, qkv: Any, table: Any, k_cache: Any, v_cache: Any, position: Any) -> None:
    """The last two results start as the caches."""
    q, *caches = results
    batch, (count, heads), (length, kv_heads) = q.shape[:-3], q.shape[-3:-1], caches[0].shape[-3:-1]
    keys, values = slice(heads, heads + kv_heads), slice(heads + kv_heads, None)
    _rotate(q, qkv[..., :heads, :], table)
    k = xp.empty_like(qkv[..., keys, :])
    _rotate(k, qkv[..., keys, :], table)
    first = np.broadcast_to(np.clip(to_host(position), 0, length - count), batch)
    for index in np.ndindex(batch):
        here = slice(first[index], first[index] + count)
        for cache, new in zip(caches, (k, qkv[..., values, :]), strict=True):
            cache[index][here] = new[index]


ROTARY_APPEND = PythonKernel(
    rotary_append,
    aliases={"k_cache": 1, "v_cache": 2},
    only_if_chosen=True,
)
ROTARY_EMBEDDING = PythonKernel(rotary_embedding, only_if_chosen=True)
