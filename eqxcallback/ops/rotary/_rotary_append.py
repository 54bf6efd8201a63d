"""Rotation of new tokens' queries and keys, and the caches with their keys and values."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Integer

from ...core import AnyArray, check, check_floats, integers
from ...kernel import NativeKernel
from ...transform import Implementation, Op
from . import _cuda, _numpy, _reference
from ._rotary import table_for


_NATIVE = NativeKernel("rotary_append", aliases={"k_cache": 1, "v_cache": 2}, supports=_cuda.ROTARY_APPEND.supports)
_rotary_append = Op(
    "rotary_append",
    kernels={"cpu": (_NATIVE, _numpy.ROTARY_APPEND), "cuda": (_cuda.ROTARY_APPEND, _numpy.ROTARY_APPEND)},
    reference=_reference.rotary_append,
    vmap_method={
        "qkv": "broadcast_all",
        "table": "fold",
        "k_cache": "broadcast_all",
        "v_cache": "broadcast_all",
        "position": "fold",
    },
    sharding="... _ _ _, ... _ _, ... _ _, ... _ _ _, ... _ _ _, ... -> ... _ _ _, ... _ _ _, ... _ _ _",
)


def rotary_append(
    qkv: Float[AnyArray, "*batch rows all_heads size"],
    cos: Float[AnyArray, "... rows half"],
    sin: Float[AnyArray, "... rows half"],
    k_cache: Float[AnyArray, "*batch length kv_heads size"],
    v_cache: Float[AnyArray, "*batch length kv_heads size"],
    position: Integer[ArrayLike, "*batch"],
    *,
    implementation: Implementation = "auto",
) -> tuple[
    Float[Array, "*batch rows heads size"],
    Float[Array, "*batch length kv_heads size"],
    Float[Array, "*batch length kv_heads size"],
]:
    """[`eqxcallback.ops.rotary_embedding`][] of new queries and keys, and [`eqxcallback.ops.cache_append`][] of the keys and the
    values, in one pass: what stands between one projection of all three and their attention.

    **Arguments:**

    - `qkv`: queries, keys and values side by side, of shape `(*batch, rows, heads + 2 * kv_heads, size)`. f32, bf16 and f16 run
        the kernel, other dtypes the reference.
    - `cos`, `sin`: of [`eqxcallback.ops.rotary_table`][], of shape `(*batch, rows, size / 2)`, or `(rows, size / 2)` for all of
        the batch.
    - `k_cache`, `v_cache`: of shape `(*batch, length, kv_heads, size)` and the dtype of `qkv`, with `rows <= length`. They are
        written in place where XLA lets it, as by `cache_append`.
    - `position`: where the first row goes, int32 of shape `batch` or `()`. Clamped, a negative one to 0, so that all rows fit.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** a tuple of the rotated queries, of shape `(*batch, rows, heads, size)`, and of both caches.

    ??? cite

        [RoFormer: Enhanced Transformer with Rotary Position Embedding](https://arxiv.org/abs/2104.09864)
    """
    name = "rotary_append"
    qkv, cos, sin, k_cache, v_cache = (jnp.asarray(x) for x in (qkv, cos, sin, k_cache, v_cache))
    check_floats(name, qkv=qkv, k_cache=k_cache, v_cache=v_cache)
    check(
        qkv.ndim >= 3 and qkv.shape[-1] % 2 == 0,
        name,
        "qkv of shape (*batch, rows, heads + 2 * kv_heads, size), size even",
        qkv=qkv,
    )
    batch, (rows, heads, size) = qkv.shape[:-3], qkv.shape[-3:]
    check(
        k_cache.shape == v_cache.shape
        and k_cache.ndim == qkv.ndim
        and (k_cache.shape[:-3], k_cache.shape[-1]) == (batch, size)
        and k_cache.shape[-3] >= rows
        and 2 * k_cache.shape[-2] <= heads,
        name,
        "k_cache and v_cache of shape (*batch, length, kv_heads, size), where length is at least rows, for qkv of shape "
        "(*batch, rows, heads + 2 * kv_heads, size)",
        k_cache=k_cache,
        v_cache=v_cache,
        qkv=qkv,
    )
    table = table_for(name, qkv, cos, sin)
    start = integers(name, "position", position, batch)
    function: Any = _rotary_append.using(implementation)
    # As for rotary_embedding: an operand without axes has the innermost ones of the batch.
    for _ in range(qkv.ndim - 1 - cos.ndim):
        function = jax.vmap(function, in_axes=(0, None, 0, 0, 0))
    return function(qkv, table, k_cache, v_cache, start)
