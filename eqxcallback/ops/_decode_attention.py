"""The attention of one new token over a cache."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Int8

from .. import kernels, reference
from .._checks import check, check_floats, integers, scale_of, soft_cap_of
from ..kernel import NativeKernel
from ..kernels import host
from ..op import Implementation, Op
from ._attention_operands import check_keys, slopes_of, window_of
from ._run import on_cpus, run


_decode_attention = Op(
    "decode_attention",
    kernels={"cpu": NativeKernel("decode_attention"), "cuda": kernels.DECODE_ATTENTION},
    reference=lambda q, kv, length, **options: reference.decode_attention(q, kv[0], kv[1], length, **options),
    batching={"q": "batched", "kv": "either", "length": "either"},
    alternatives={"cpu": (host.DECODE_ATTENTION,), "cuda": (host.DECODE_ATTENTION,)},
)
# With options that the kernel for GPUs does not know.
_masked_decode_attention = Op(
    "decode_attention",
    kernels={"cpu": NativeKernel("masked_decode_attention")},
    reference=lambda q, kv, length, alibi_slopes, **options: reference.decode_attention(
        q, kv[0], kv[1], length, alibi_slopes, **options
    ),
    batching={"q": "batched", "kv": "either", "length": "either", "alibi_slopes": "either"},
    alternatives={"cpu": (host.DECODE_ATTENTION,), "cuda": (host.DECODE_ATTENTION,)},
)
# Keys and values in int8, each with its scales.
_int8_decode_attention = Op(
    "int8_decode_attention",
    kernels={"cpu": NativeKernel("int8_decode_attention")},
    reference=reference.int8_decode_attention,
    batching={"q": "batched", "kv": "either", "length": "either", "alibi_slopes": "either"},
    alternatives={"cpu": (host.INT8_DECODE_ATTENTION,), "cuda": (host.INT8_DECODE_ATTENTION,)},
)


def decode_attention(
    q: Float[Array, "*batch heads size"],
    k: Float[Array, "*batch keys kv_heads size"] | Int8[Array, "*batch keys kv_heads size"],
    v: Float[Array, "*batch keys kv_heads size"] | Int8[Array, "*batch keys kv_heads size"],
    length: Int[ArrayLike, "*batch"],
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Float[ArrayLike, " heads"] | None = None,
    k_scale: Float[Array, "*batch keys kv_heads"] | None = None,
    v_scale: Float[Array, "*batch keys kv_heads"] | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch heads size"]:
    """The attention of one new token over the first `length` entries of a cache. Its time follows `length`, not `keys`.

    **Arguments:**

    - `q`: the token's queries, of shape `(*batch, heads, size)`. f32, bf16 and f16 run the kernel, other dtypes the reference.
    - `k`, `v`: the cache, of shape `(*batch, keys, kv_heads, size)`, as in [`eqxcallback.ops.attention`][].
    - `length`: how many entries are filled, int32 of shape `batch` or `()`. Clamped to `0 .. keys`. The token itself is the
        last of them.
    - `scale`: by default $1 / \\sqrt{\\mathrm{size}}$.
    - `window`: a positive number: only the last `window` of the entries are seen, and read. By default all.
    - `soft_cap`, `alibi_slopes`: as in [`eqxcallback.ops.attention`][]. With these or `window`, the reference runs on a GPU.
    - `k_scale`, `v_scale`: of a cache in int8, of shape `(*batch, keys, kv_heads)`: an entry is the integers times its scale.
        They are dequantised in the kernel's registers. With these, the reference runs on a GPU.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of the shape and dtype of `q`, zeros where `length` is 0.
    """
    name = "decode_attention"
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    check(q.ndim >= 2, name, "q of shape (*batch, heads, size)", q=q)
    batch = q.shape[:-2]
    scales = {name: x for name, x in (("k_scale", k_scale), ("v_scale", v_scale)) if x is not None}
    if len(scales) == 1:
        raise ValueError(f"{name}: expected both k_scale and v_scale, or none; got {', '.join(scales)}.")
    check_keys(name, q, k, v, batch, int8=bool(scales))
    length = integers(name, "length", length, batch)
    options: dict[str, Any] = {"scale": scale_of(name, scale, q.shape[-1])}
    more = {"window": window_of(name, window), "soft_cap": soft_cap_of(name, soft_cap) or 0.0}
    slopes = None if alibi_slopes is None else slopes_of(name, alibi_slopes, q, batch, q.shape[-2])
    if scales:
        arrays = {name: jnp.asarray(x) for name, x in scales.items()}
        check_floats(name, **arrays)
        fits = all(x.shape == k.shape[:-1] for x in arrays.values())
        check(fits, name, f"k_scale and v_scale of shape {k.shape[:-1]}", **arrays)
        kv = (k, v, *(x.astype(reference.wide(q.dtype)) for x in arrays.values()))
        op = _int8_decode_attention
        return run(op, q, kv, length, slopes, implementation=implementation, **options, **more)
    if any(more.values()) or slopes is not None:
        op = _masked_decode_attention
        return run(op, q, (k, v), length, slopes, implementation=implementation, **options, **more)
    op = _decode_attention if q.shape[-1] <= kernels.MAX_DECODE_SIZE else on_cpus(_decode_attention)
    return run(op, q, (k, v), length, implementation=implementation, **options)
