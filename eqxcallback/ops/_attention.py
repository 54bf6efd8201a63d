"""Scaled dot-product attention with grouped queries."""

import math

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from .. import kernels, reference
from ..kernel import NativeKernel
from ..op import Op
from ._checks import check, check_floats, integers, on_cpus, run


# Keys and values are one argument, which is mapped as a whole.
_attention = Op(
    "attention",
    kernels={"cpu": NativeKernel("attention"), "cuda": kernels.ATTENTION},
    reference=lambda q, kv, **options: reference.attention(q, kv[0], kv[1], **options),
    batching={"q": "batched", "kv": "either"},
    backward={"cuda": kernels.ATTENTION_BACKWARD},
)
_decode_attention = Op(
    "decode_attention",
    kernels={"cpu": NativeKernel("decode_attention"), "cuda": kernels.DECODE_ATTENTION},
    reference=lambda q, kv, length, **options: reference.decode_attention(q, kv[0], kv[1], length, **options),
    batching={"q": "batched", "kv": "either", "length": "either"},
)


def attention(
    q: Float[Array, "*batch queries heads size"],
    k: Float[Array, "*batch keys kv_heads size"],
    v: Float[Array, "*batch keys kv_heads size"],
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Float[Array, "*batch queries heads size"]:
    r"""$\mathrm{softmax}(s\, q k^T)\, v$, computed in f32, without an array of queries times keys.

    **Arguments:**

    - `q`: queries, of shape `(*batch, queries, heads, size)`. f32 and bf16 run the kernel, on a GPU f16 as well, other
        dtypes the reference.
    - `k`, `v`: keys and values, of shape `(*batch, keys, kv_heads, size)`. `heads` is a multiple of `kv_heads`: query head `h`
        uses key/value head `h // (heads // kv_heads)`.
    - `causal`: whether query `i` sees only the keys up to `i + keys - queries`, so that the last query sees all. A query that
        sees no key gives zeros.
    - `scale`: $s$, by default $1 / \sqrt{\mathrm{size}}$.

    **Returns:** an array of the shape and dtype of `q`.

    ??? cite

        [FlashAttention](https://arxiv.org/abs/2205.14135), [GQA](https://arxiv.org/abs/2305.13245)
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    check(q.ndim >= 3, "attention", "q of shape (*batch, queries, heads, size)", q=q)
    _check_keys("attention", q, k, v, q.shape[:-3])
    op = _attention if q.shape[-1] <= kernels.MAX_ATTENTION_SIZE else on_cpus(_attention)
    return run(op, q, (k, v), causal=bool(causal), scale=_scale(scale, q))


def decode_attention(
    q: Float[Array, "*batch heads size"],
    k: Float[Array, "*batch keys kv_heads size"],
    v: Float[Array, "*batch keys kv_heads size"],
    length: Int[ArrayLike, "*batch"],
    *,
    scale: float | None = None,
) -> Float[Array, "*batch heads size"]:
    """The attention of one new token over the first `length` entries of a cache. Its time follows `length`, not `keys`.

    **Arguments:**

    - `q`: the token's queries, of shape `(*batch, heads, size)`. f32 and bf16 run the kernel, on a GPU f16 as well, other
        dtypes the reference.
    - `k`, `v`: the cache, of shape `(*batch, keys, kv_heads, size)`, as in [`eqxcallback.ops.attention`][].
    - `length`: how many entries are filled, int32 of shape `batch` or `()`. Clamped to `0 .. keys`.
    - `scale`: by default $1 / \\sqrt{\\mathrm{size}}$.

    **Returns:** an array of the shape and dtype of `q`.
    """
    name = "decode_attention"
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    check(q.ndim >= 2, name, "q of shape (*batch, heads, size)", q=q)
    batch = q.shape[:-2]
    _check_keys(name, q, k, v, batch)
    op = _decode_attention if q.shape[-1] <= kernels.MAX_DECODE_SIZE else on_cpus(_decode_attention)
    return run(op, q, (k, v), integers(name, "length", length, batch), scale=_scale(scale, q))


def _check_keys(name: str, q: Array, k: Array, v: Array, batch: tuple[int, ...]) -> None:
    check_floats(name, q=q, k=k, v=v)
    heads, size = q.shape[-2:]
    check(
        k.shape == v.shape and k.ndim == len(batch) + 3,
        name,
        "k and v of shape (*batch, keys, kv_heads, size)",
        k=k,
        v=v,
    )
    check(k.shape[:-3] == batch and k.shape[-1] == size, name, "q and k of the same batch axes and head size", q=q, k=k)
    kv_heads = k.shape[-2]
    check(
        kv_heads > 0 and heads % kv_heads == 0,
        name,
        f"the heads of q, {heads}, to be a multiple of those of k, {kv_heads}",
        q=q,
        k=k,
    )


def _scale(scale: float | None, q: Array) -> float:
    return 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)
