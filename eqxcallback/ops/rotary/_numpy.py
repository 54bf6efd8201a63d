"""Rotary position embedding."""

from types import ModuleType

from ...core import PyTree
from ...kernel import PythonKernel
from .._numpy import XpArray, append, on_arrays, store, wide


@on_arrays
def rotary_embedding(xp: ModuleType, out: XpArray, x: XpArray, table: XpArray) -> None:
    _rotate(out, x, table)


def _rotate(out: XpArray, x: XpArray, table: XpArray) -> None:
    """The axes of the table are the last ones of those of `x`."""
    half = x.shape[-1] // 2
    cos, sin = (part[..., :, None, :] for part in table)
    a, b = wide(x[..., :half]), wide(x[..., half:])
    store(out[..., :half], a * cos - b * sin)
    store(out[..., half:], b * cos + a * sin)


@on_arrays
def rotary_append(
    xp: ModuleType,
    results: PyTree,
    qkv: XpArray,
    table: XpArray,
    k_cache: XpArray,
    v_cache: XpArray,
    position: XpArray,
) -> None:
    """The last two results start as the caches."""
    q, new_k_cache, new_v_cache = results
    heads, kv_heads = q.shape[-2], k_cache.shape[-2]
    keys, v = qkv[..., heads : heads + kv_heads, :], qkv[..., heads + kv_heads :, :]
    _rotate(q, qkv[..., :heads, :], table)
    k = xp.empty_like(keys)
    _rotate(k, keys, table)
    append(new_k_cache, k, position, row_rank=2)
    append(new_v_cache, v, position, row_rank=2)


ROTARY_APPEND = PythonKernel(rotary_append, aliases={"k_cache": 1, "v_cache": 2}, only_if_chosen=True)
ROTARY_EMBEDDING = PythonKernel(rotary_embedding, only_if_chosen=True)
