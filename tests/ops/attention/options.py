"""Attention with every option, one head after the other, in f64: what all implementations are tested against."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqxcallback import ops

from .. import table
from ..table import normal


def exact(*args: Any, **options: Any) -> Any:
    """Return the result of one example."""
    return exact_with_lse(*args, **options)[0]


def exact_with_lse(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal=False,
    scale=None,
    window=None,
    soft_cap=None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    segment_ids: Any = None,
    lengths=None,
    offset=None,
    dropout=0.0,
    key: Any = None,
) -> Any:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (queries, heads, size), (keys, kv_heads, _) = q.shape, k.shape
    position = (keys - queries if offset is None else int(offset)) + np.arange(queries)[:, None]
    key_index = np.arange(keys)[None]
    seen = np.ones((queries, keys), bool)
    if causal:
        seen &= key_index <= position
    if isinstance(window, tuple):
        left, right = (keys + queries if side is None else side for side in window)
        seen &= (position - left <= key_index) & (key_index <= position + right)
    elif window:
        seen &= position - window < key_index if causal else np.abs(position - key_index) < window
    if lengths is not None:
        seen &= key_index < int(lengths)
    if segment_ids is not None:
        of_queries, of_keys = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        seen &= np.asarray(of_queries)[:, None] == np.asarray(of_keys)[None]
    out, lse = np.zeros((queries, heads, v.shape[-1])), np.full((queries, heads), -np.inf)
    for h in range(heads):
        group = h // (heads // kv_heads)
        logits = (size**-0.5 if scale is None else scale) * q[:, h] @ k[:, group].T
        if soft_cap:
            logits = soft_cap * np.tanh(logits / soft_cap)
        if bias is not None:
            logits = logits + np.asarray(bias, np.float64)[h % bias.shape[0]]
        if alibi_slopes is not None:
            logits = logits - float(alibi_slopes[h]) * np.abs(position - key_index)
        now = seen if mask is None else seen & np.asarray(mask)[h % mask.shape[0]]
        logits = np.where(now, logits, -np.inf)
        highest = logits.max(1, keepdims=True, initial=-np.inf)
        weights = np.exp(logits - np.where(np.isinf(highest), 0, highest))
        some = ~np.isinf(highest[:, 0])
        lse[some, h] = (highest[:, 0] + np.log(np.maximum(weights.sum(1), 1e-300)))[some]
        weights = weights / np.maximum(weights.sum(1, keepdims=True), 1e-300)
        if dropout:
            kept = jax.random.bernoulli(jax.random.split(key, heads)[h], 1 - dropout, (queries, keys))
            weights = np.where(kept, weights / (1 - dropout), 0)
        out[:, h] = weights @ v[:, group]
    return out, lse


def gradients_with(given: Any, implementation: str) -> Any:
    """Return what computes the gradients of q, k, v, and of the bias and the slopes if there are any."""
    more = [name for name in ("bias", "alibi_slopes") if name in given]

    def loss(q, k, v, *rest):
        options = {**given, **dict(zip(more, rest, strict=True)), "implementation": implementation}
        return (jnp.asarray(normal(9, q.shape)) * ops.attention(q, k, v, **options).astype(jnp.float32)).sum()

    f = table.quickly_compiled(jax.grad(loss, tuple(range(3 + len(more)))))
    return lambda *args: f(*args, *(jnp.asarray(given[name]) for name in more))


def gradients(args: Any, given: Any, implementation: str) -> Any:
    return gradients_with(given, implementation)(*args)


def inputs(queries, keys, heads, kv_heads, size, dtype: Any = np.float32):
    return tuple(
        normal(i, shape, dtype) for i, shape in enumerate([(queries, heads, size), *[(keys, kv_heads, size)] * 2])
    )


def options(queries, keys, heads) -> dict[str, dict[str, Any]]:
    """Each option alone, and some together."""
    rng = np.random.default_rng((queries, keys, heads))
    some_inf = normal(1, (heads, queries, keys))
    some_inf[rng.random(some_inf.shape) < 0.2] = -np.inf
    some_inf[:, queries // 2] = -np.inf
    mask = rng.random((heads, queries, keys)) < 0.6
    mask[:, queries // 3] = False
    slopes = np.abs(normal(2, (heads,)))
    segments = tuple(np.sort(rng.integers(0, 4, n)).astype(np.int32) for n in (queries, keys))
    return {
        "window": {"window": max(keys // 3, 1)},
        "causal window": {"causal": True, "window": max(keys // 4, 1)},
        "window of one": {"causal": True, "window": 1},
        "window of two sides": {"window": (keys // 4, 2)},
        "window before and at": {"window": (None, 0)},
        "causal window of two sides": {"window": (2, None), "causal": True},
        "window of two sides, offset": {"window": (1, 1), "offset": np.int32(2)},
        "soft cap": {"soft_cap": 1.5},
        "bias": {"bias": normal(1, (heads, queries, keys))},
        "bias of all heads": {"bias": normal(1, (1, queries, keys))},
        "bias with -inf": {"bias": some_inf},
        "bf16 bias": {"bias": normal(1, (heads, queries, keys), table.DTYPES[1])},
        "bias of keys": {"bias": normal(1, (1, 1, keys))},
        "bias of keys for each head": {"bias": normal(1, (heads, 1, keys)), "lengths": np.int32(keys - 1)},
        "bf16 bias of keys": {"bias": normal(1, (1, 1, keys), table.DTYPES[1]), "soft_cap": 2.0},
        "bias of keys with -inf": {"bias": some_inf[:1, :1], "causal": True},
        "bias of queries": {"bias": normal(1, (heads, queries, 1))},
        "mask": {"mask": mask},
        "mask of keys": {"mask": mask[:1, :1]},
        "mask of keys and segments": {"mask": mask[:1, :1], "segment_ids": segments},
        "mask of keys for each head": {"mask": mask[:, :1]},
        "mask of keys for each head, and bias": {"mask": mask[:, :1], "bias": normal(1, (heads, queries, keys))},
        "mask and bias of keys": {"mask": mask[:1, :1], "bias": normal(1, (1, 1, keys)), "segment_ids": segments},
        "mask of queries": {"mask": mask[:, :, :1]},
        "causal mask of all heads": {"mask": mask[:1], "causal": True},
        "alibi": {"alibi_slopes": slopes},
        "alibi before the keys": {"alibi_slopes": slopes, "offset": np.int32(-3)},
        "segments": {"segment_ids": segments},
        "lengths": {"lengths": np.int32(keys - keys // 3)},
        "no length": {"lengths": np.int32(0)},
        "offset": {"offset": np.int32(2), "causal": True},
        "offset before the keys": {"offset": np.int32(-2), "causal": True},
        "offset after the keys": {"offset": np.int32(keys + 2), "window": 4},
        "dropout": {"dropout": 0.3, "key": jax.random.key(5)},
        "causal dropout": {"dropout": 0.1, "key": jax.random.key(6), "causal": True},
        "all": {
            "causal": True,
            "scale": -0.7,
            "window": keys // 2 + 1,
            "soft_cap": 2.0,
            "bias": some_inf,
            "mask": mask[:1],
            "alibi_slopes": slopes,
            "segment_ids": segments,
            "lengths": np.int32(keys - 1),
            "offset": np.int32(keys - queries + 1),
            "dropout": 0.2,
            "key": jax.random.key(1),
        },
    }


def hiding(kind, queries, keys):
    """A mask that hides blocks of keys from blocks of queries."""
    row, column = np.ogrid[:queries, :keys]
    masks: dict[str, Any] = {
        "causal": column <= row + keys - queries,
        "reversed": column >= row,
        "band": np.abs(row - column) < 9,
        "ends": (column >= 131) & (column < 300),
        "holes": (column < 3) | (column > keys - 2),
        "some queries": (row < 64) & (column < 200) | (row > 140) & (column > 250),
        "nothing": False,
        "everything": True,
    }
    return np.broadcast_to(masks[kind], (queries, keys))


def case(batch=()):
    """All operands at once, as arguments."""
    queries, keys, heads, kv_heads, size = 5, 7, 4, 2, 3
    rng = np.random.default_rng(1)
    args = (
        normal(1, (*batch, queries, heads, size)),
        normal(2, (*batch, keys, kv_heads, size)),
        normal(3, (*batch, keys, kv_heads, size)),
        normal(4, (heads, queries, keys)),
        rng.random((*batch, 1, queries, keys)) < 0.8,
        np.abs(normal(5, (heads,))),
        rng.integers(0, 2, (*batch, queries)).astype(np.int32),
        rng.integers(0, 2, (*batch, keys)).astype(np.int32),
        np.full(batch, keys - 1, np.int32),
        np.full(batch, 1, np.int32),
        rng.integers(0, 2**32, (*batch, 2), np.uint32),
    )

    def of(implementation):
        def f(q, k, v, bias, mask, slopes, of_queries, of_keys, lengths, offset, key):
            return ops.attention(
                *(q, k, v),
                **{"causal": True, "window": 5, "soft_cap": 2.0, "bias": bias, "mask": mask, "alibi_slopes": slopes},
                **{"segment_ids": (of_queries, of_keys), "lengths": lengths, "offset": offset},
                **{"dropout": 0.2, "key": key, "implementation": implementation},
            )

        return f

    return table.Case(of("auto"), of("reference"), args, keys + size)


def decode_case(batch=(), keys=40, int8=False, **more: Any):
    heads, kv_heads, size = 4, 2, 6
    lengths = np.full(batch, keys - 3, np.int32) if batch == () else (keys - 3 - np.arange(batch[0])).astype(np.int32)
    q, k, v = (
        normal(i, (*batch, *shape)) for i, shape in enumerate([(heads, size), *[(keys, kv_heads, size)] * 2], start=1)
    )
    scales = ()
    if int8:
        scales = tuple(np.abs(normal(i, x.shape[:-1])) / 3 for i, x in ((6, k), (7, v)))
        k, v = ((x * 3).astype(np.int8) for x in (k, v))
    args = (q, k, v, lengths, np.abs(normal(5, (heads,))), *scales)
    options = {"window": 21, "soft_cap": 2.0, **more}

    def of(implementation):
        def f(q, k, v, length, slopes, *scales):
            of_int8 = dict(zip(("k_scale", "v_scale"), scales, strict=False))
            chosen = {"alibi_slopes": slopes, "implementation": implementation, **options, **of_int8}
            return ops.decode_attention(q, k, v, length, **chosen)

        return f

    return table.Case(of("auto"), of("reference"), args, keys + size)


NAMES = list(options(2, 2, 2))
