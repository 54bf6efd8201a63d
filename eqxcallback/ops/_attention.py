"""Scaled dot-product attention with grouped queries."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PRNGKeyArray

from .. import kernels, reference
from .._checks import check, scale_of, soft_cap_of
from ..kernel import NativeKernel
from ..kernels import host
from ..op import Implementation, Op
from ._attention_operands import (
    OPTIONAL,
    Segments,
    check_keys,
    dropout_of,
    given,
    operands,
    window_of,
)
from ._run import on_cpus, run


def _with_options(
    q: Any,
    kv: Any,
    bias: Any,
    mask: Any,
    alibi_slopes: Any,
    segment_ids: Any,
    lengths: Any,
    offset: Any,
    dropout_keys: Any,
    kept: Any,
    *,
    operands: str,
    **options: Any,
) -> Array:
    del operands  # those that there are not are None
    more = (bias, mask, alibi_slopes, segment_ids, lengths, offset, dropout_keys, kept)
    return reference.attention(q, kv[0], kv[1], *more, **options)


# Keys and values are one argument, which is mapped as a whole.
_attention = Op(
    "attention",
    kernels={"cpu": NativeKernel("attention"), "cuda": kernels.ATTENTION},
    reference=lambda q, kv, **options: reference.attention(q, kv[0], kv[1], **options),
    batching={"q": "batched", "kv": "either"},
    backward={"cpu": NativeKernel("attention_backward"), "cuda": kernels.ATTENTION_BACKWARD},
    alternatives={"cpu": (host.ATTENTION,), "cuda": (host.ATTENTION,)},
)
# With any of the options that those kernels for GPUs do not know.
_masked_attention = Op(
    "attention",
    kernels={"cpu": NativeKernel("masked_attention")},
    reference=_with_options,
    batching={"q": "batched", "kv": "either", **dict.fromkeys(OPTIONAL, "either")},
    backward={"cpu": NativeKernel("masked_attention_backward")},
    alternatives={"cpu": (host.ATTENTION,), "cuda": (host.ATTENTION,)},
)


def attention(
    q: Float[Array, "*batch queries heads size"],
    k: Float[Array, "*batch keys kv_heads size"],
    v: Float[Array, "*batch keys kv_heads size"],
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    bias: Float[ArrayLike, "*#batch #heads queries keys"] | None = None,
    mask: Bool[ArrayLike, "*#batch #heads queries keys"] | None = None,
    alibi_slopes: Float[ArrayLike, " heads"] | None = None,
    segment_ids: Segments = None,
    lengths: Int[ArrayLike, "*batch"] | None = None,
    offset: Int[ArrayLike, "*batch"] | None = None,
    dropout: float = 0.0,
    key: PRNGKeyArray | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch queries heads size"]:
    r"""$\mathrm{softmax}(s\, q k^T)\, v$, computed in f32, without an array of queries times keys.

    **Arguments:**

    - `q`: queries, of shape `(*batch, queries, heads, size)`. f32, bf16 and f16 run the kernel, other dtypes the reference.
    - `k`, `v`: keys and values, of shape `(*batch, keys, kv_heads, size)`. `heads` is a multiple of `kv_heads`: query head `h`
        uses key/value head `h // (heads // kv_heads)`.
    - `causal`: whether query `i`, which is at position `p = offset + i` among the keys, sees only the keys `j <= p`. A query
        that sees no key gives zeros, and its gradients are zero.
    - `scale`: $s$, by default $1 / \sqrt{\mathrm{size}}$.
    - `window`: a positive number: under `causal` a query sees the last `window` keys up to its own position, `p - window < j`,
        else those nearer than that on both sides, `abs(p - j) < window`. By default all.
    - `soft_cap`: $c$: logits $l$ become $c \tanh(l / c)$, before what is added to them. By default they stay.
    - `bias`: added to the logits, of shape `(*batch, heads, queries, keys)`, where batch axes may be missing, and batch axes
        and heads may be 1. f32 or bf16 whatever `q` is. It may be `-inf`.
    - `mask`: bool, of the shapes of `bias`; `True` where a key is seen.
    - `alibi_slopes`: $m_h$, of shape `(heads,)`: $m_h |p - j|$ is subtracted from the logits.
    - `segment_ids`: int32 arrays of shape `(*batch, queries)` and `(*batch, keys)`, a tuple, or one for both: a query sees the
        keys of its own segment.
    - `lengths`: int32 of shape `batch` or `()`: only the keys `j < lengths` are seen. The others may be
        NaN, and the CPU's kernel does not read them.
    - `offset`: the position of the first query, int32 of shape `batch` or `()`, by default `keys - queries`, so that the last
        query is at the last key. Beyond 2^30 on both sides it is clamped.
    - `dropout`: the probability with which a weight becomes zero; the others are divided by `1 - dropout`. It is from 0 up
        to, and without, 1.
    - `key`: for `dropout`, a key for each example, of shape `batch`. The weights of head `h` that stay are those
        where `jax.random.bernoulli(jax.random.split(key, heads)[h], 1 - dropout, (queries, keys))` is true: the same as of
        `equinox.nn.MultiheadAttention`.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of the shape and dtype of `q`.

    What is a conjunction: a key is seen where `causal`, `window`, `mask`, `segment_ids` and `lengths` all let it be. Those
    that are not seen have a weight of zero, which does not hide NaN or infinities of theirs; only `lengths` does.

    Memory, beside operands and results, is proportional to `queries + keys`, in the value and in its first and second
    derivatives, on each platform. One exception is dropout with a key that is not of Threefry, or
    without `jax_threefry_partitionable`, or with `jax_enable_x64`: which weights stay is then an array of bools of
    shape `(*batch, heads, queries, keys)`. A `bias` has a gradient of its own size.

    On a GPU the kernels know `causal` and `scale`; with any other option the reference runs there.

    ??? cite

        [FlashAttention](https://arxiv.org/abs/2205.14135), [GQA](https://arxiv.org/abs/2305.13245),
        [ALiBi](https://arxiv.org/abs/2108.12409), [sliding windows](https://arxiv.org/abs/2004.05150),
        [soft capping](https://arxiv.org/abs/2408.00118)
    """
    name = "attention"
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    check(q.ndim >= 3, name, "q of shape (*batch, queries, heads, size)", q=q)
    check_keys(name, q, k, v, q.shape[:-3])
    options: dict[str, Any] = {"causal": bool(causal), "scale": scale_of(name, scale, q.shape[-1])}
    more = {
        "window": window_of(name, window),
        "soft_cap": soft_cap_of(name, soft_cap) or 0.0,
        "dropout": dropout_of(name, dropout, key),
    }
    found = operands(
        name,
        q,
        k.shape[-3],
        bias=bias,
        mask=mask,
        alibi_slopes=alibi_slopes,
        segment_ids=segment_ids,
        lengths=lengths,
        offset=offset,
        dropout=dropout,
        key=key,
    )
    if any(more.values()) or any(x is not None for x in found.values()):
        names = given(found)
        return run(
            _masked_attention,
            q,
            (k, v),
            *found.values(),
            operands=names,
            implementation=implementation,
            **options,
            **more,
        )
    op = _attention if q.shape[-1] <= kernels.MAX_ATTENTION_SIZE else on_cpus(_attention)
    return run(op, q, (k, v), implementation=implementation, **options)
