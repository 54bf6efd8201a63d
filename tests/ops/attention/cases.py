"""Attention: operands, what the references say of them, and which tests take which."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from eqxcallback import ops
from eqxcallback.ops.attention import _reference as reference

from ..table import BATCHES, Case, Row, floats, normal, python, row, rows, with_options
from . import options


def attention(
    dtype: Any,
    batch: Any,
    queries: int,
    keys: int,
    heads: int,
    kv_heads: int,
    size: int,
    causal: bool = False,
    scale: float | None = None,
) -> Case:
    args = (
        normal(1, (*batch, queries, heads, size), dtype),
        normal(2, (*batch, keys, kv_heads, size), dtype),
        normal(3, (*batch, keys, kv_heads, size), dtype),
    )
    used = 1 / math.sqrt(max(size, 1)) if scale is None else scale
    op = with_options(ops.attention, causal=causal, scale=scale)
    return Case(op, with_options(reference.attention, causal=causal, scale=used), args, keys + size)


def decode_attention(
    dtype: Any, batch: Any, keys: int, heads: int, kv_heads: int, size: int, lengths: Any = None
) -> Case:
    lengths = (
        np.random.default_rng(4).integers(-1, keys + 2, batch) if lengths is None else np.broadcast_to(lengths, batch)
    )
    args = (
        normal(1, (*batch, heads, size), dtype),
        normal(2, (*batch, keys, kv_heads, size), dtype),
        normal(3, (*batch, keys, kv_heads, size), dtype),
        np.asarray(lengths, np.int32),
    )
    definition = with_options(reference.decode_attention, scale=1 / math.sqrt(max(size, 1)))
    return Case(ops.decode_attention, definition, args, keys + size)


def with_every_option(dtype: Any, batch: Any = ()) -> Case:
    assert dtype == np.float32
    return options.case(batch)


def decode_with_options(dtype: Any, batch: Any = (), int8: bool = False) -> Case:
    assert dtype == np.float32
    return options.decode_case(batch, int8=int8)


def of_model(model: Any) -> Iterator[Row]:
    heads = (model.heads, model.kv_heads, model.head_size)
    yield row(attention, (), 33, 65, *heads, model.causal, tags=())
    yield row(decode_attention, (2,), 130, *heads, tags=())


def _attended(dtype: Any, batch: Any, queries: int, keys: int, heads: int, kv_heads: int, size: int) -> Any:
    kv = (*batch, keys, kv_heads, size)
    return floats(dtype, (*batch, queries, heads, size), kv, kv)


def _decoded(dtype: Any, batch: Any, keys: int, kv_heads: int, size: int, length: Any) -> Any:
    """Two heads for each of those of keys."""
    k, v = _attended(dtype, batch, 1, keys, 2 * kv_heads, kv_heads, size)[1:]
    return [normal(9, (*batch, 2 * kv_heads, size), dtype), k, v, length]


def _pairs(*shape: int) -> Any:
    """A bias, slopes, segments, lengths and offsets for `(*batch, heads, queries, keys)`."""
    *batch, heads, queries, keys = shape
    rng = np.random.default_rng(6)
    segments = (rng.integers(0, 2, (*batch, size)).astype(np.int32) for size in (queries, keys))
    lengths, offset = (rng.integers(keys // 2, keys, batch).astype(np.int32) for _ in range(2))
    return [normal(7, (heads, queries, keys)), normal(8, (heads,)), *segments, lengths, offset]


def of_pairs(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    alibi_slopes: Any,
    query_ids: Any,
    key_ids: Any,
    lengths: Any,
    offset: Any,
    *,
    dropout: float = 0.0,
    **more: Any,
) -> Any:
    """One random key for each example."""
    key = jax.random.split(jax.random.key(3), q.shape[:-3]) if dropout else None
    return ops.attention(
        q,
        k,
        v,
        bias=bias,
        mask=bias > -1,
        alibi_slopes=alibi_slopes,
        segment_ids=(query_ids, key_ids),
        lengths=lengths,
        offset=offset,
        dropout=dropout,
        key=key,
        **more,
    )


_DECODE_OPTIONS: Any = {"window": 4, "soft_cap": 2.0}

CASES = [
    *rows(
        attention,
        [
            *[(batch, 3, 17, 4, 2, 17, causal) for batch in BATCHES for causal in (True, False)],
            *[((), n, n, 1, 1, 16, True) for n in (1, 63, 65, 129, 257)],
            *[((), 5, keys, 3, 3, 8, causal) for keys in (0, 1, 128, 129, 300) for causal in (True, False)],
            *[((), queries, 3, 2, 1, 4, True) for queries in (0, 4, 17, 70)],  # queries that see no key
            *[((2,), 3, 4, 6, 2, size) for size in (0, 1, 3, 63, 100)],
            ((0,), 3, 4, 2, 1, 8),
            ((), 3, 4, 0, 2, 8),
            ((), 3, 4, 2, 1, 8, False, -0.7),
            ((), 3, 4, 2, 1, 8, True, 0.0),
        ],
        "edge",
    ),
    *rows(
        decode_attention,
        [
            *[(batch, 17, 4, 2, size) for batch in BATCHES for size in (1, 17)],
            *[((), 40, 3, 1, 8, length) for length in (-1, 0, 1, 3, 15, 16, 17, 39, 40, 41)],
            *[((2,), keys, 6, 3, 63) for keys in (0, 1, 512, 513, 1100)],
            ((3,), 5, 2, 2, 0),
            ((0,), 5, 2, 2, 8),
            ((), 5, 0, 2, 8),
        ],
        "edge",
    ),
    row(attention, (2,), 301, 401, 6, 3, 40, True, tags=["large"]),
    row(attention, (), 400, 700, 3, 1, 64, tags=["large"]),
    row(decode_attention, (3,), 3001, 8, 2, 65, (3001, 1500, 7), tags=["large"]),
    row(attention, (2,), 33, 130, 4, 2, 17, True, tags=["written"]),
    row(decode_attention, (2,), 19, 16, 2, 17, tags=["written"]),
    row(attention, (), 3, 5, 4, 2, 6, True, tags=("mapped", "derived"), name="attention"),
    row(attention, (2,), 3, 5, 4, 2, 6, tags=["mapped"], name="attention of a batch"),
    row(decode_attention, (), 5, 4, 2, 6, 3, tags=("mapped", "derived"), name="decode_attention"),
    row(decode_attention, (2,), 5, 4, 2, 6, (3, 4), tags=["mapped"], name="decode_attention of a batch"),
    row(with_every_option, tags=("mapped", "derived"), name="attention with options"),
    row(with_every_option, (2,), tags=["mapped"], name="attention with options of a batch"),
    row(decode_with_options, tags=("mapped", "derived"), name="decode_attention with options"),
    row(decode_with_options, (2,), tags=["mapped"], name="decode_attention with options of a batch"),
    row(decode_with_options, (), True, tags=("mapped", "derived"), name="decode_attention in int8"),
    row(decode_with_options, (2,), True, tags=["mapped"], name="decode_attention in int8 of a batch"),
    *rows(
        attention,
        [
            *[((2,), 384, 384, 4, 2, size, causal) for size in (64, 80, 96, 128, 256) for causal in (True, False)],
            ((1,), 2048, 2048, 8, 2, 128, True),
            ((2,), 1000, 1500, 6, 3, 64, True),  # a prompt after a cache, blocks that are not full
            ((1,), 1500, 1000, 2, 1, 128, True),  # queries that see no key
            ((1,), 1, 4096, 32, 8, 128, True),
            ((2,), 40, 777, 9, 3, 64, False),
        ],
        "model",
    ),
    *rows(
        decode_attention,
        [
            ((8,), 4096, 32, 8, 128),
            ((1,), 32_768, 32, 8, 128, (32_000,)),
            ((3,), 1001, 9, 3, 64, (1001, 0, 500)),
            ((2,), 257, 4, 4, 256),
        ],
        "model",
    ),
    # Packs and no packs, one and several heads and lanes, several parts, wide heads.
    *rows(
        decode_attention,
        [
            ((1,), 17, 4, 2, 16, (17,)),
            ((2,), 70, 3, 1, 17, (70, 1)),
            ((2,), 130, 6, 1, 64, (130, 1)),
            ((1,), 300, 2, 2, 128, (300,)),
            ((1,), 5, 2, 2, 1, (5,)),
            ((1,), 70, 2, 1, 520, (70,)),
            ((1,), 9, 3, 1, 601, (9,)),
        ],
        "cuda",
    ),
    python("attention", ops.attention, lambda d: _attended(d, (2,), 3, 5, 4, 2, 6), "python mapped", "python derived"),
    python(
        "attention causal",
        with_options(ops.attention, causal=True, scale=0.4),
        lambda d: _attended(d, (), 7, 5, 3, 1, 6),
        "python mapped",
    ),
    python(
        "attention_with_lse",
        with_options(ops.attention_with_lse, causal=True),
        lambda d: _attended(d, (2,), 3, 5, 4, 2, 6),
        *("python mapped", "python derived"),
    ),
    python("attention of no keys", ops.attention, lambda d: _attended(d, (), 3, 0, 4, 2, 5)),
    python(
        "attention with options",
        with_options(of_pairs, causal=True, window=3, soft_cap=2.0),
        lambda d: [*_attended(d, (2,), 3, 5, 4, 2, 6), *_pairs(2, 4, 3, 5)],
        "python mapped",
    ),
    python(
        "attention with options of many",
        with_options(of_pairs, window=700, dropout=0.3),
        lambda d: [*_attended(d, (), 70, 1101, 2, 1, 3), *_pairs(2, 70, 1101)],
    ),
    python(
        "attention of many",
        with_options(ops.attention, causal=True),
        lambda d: _attended(d, (), 150, 1101, 2, 1, 3),
    ),
    python(
        "decode_attention",
        ops.decode_attention,
        lambda d: _decoded(d, (3,), 5, 2, 6, np.array([-1, 3, 9], np.int32)),
        *("python mapped", "python checked"),
    ),
    python("decode_attention of many", ops.decode_attention, lambda d: _decoded(d, (), 1101, 1, 3, np.int32(1001))),
    python(
        "decode_attention with options",
        functools.partial(ops.decode_attention, **_DECODE_OPTIONS, alibi_slopes=np.ones(4, np.float32)),
        lambda d: _decoded(d, (3,), 9, 2, 6, np.array([-1, 3, 9], np.int32)),
        "python mapped",
    ),
]
