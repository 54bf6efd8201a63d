"""The gradients of a bias and of slopes. Parameters are those of `_triton_backward.py`, whose kernels run before."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from ._triton_backward import dlogits_of, weights_of
from ._triton_forward import first_element, inner, load
from ._triton_pairs import BIAS_OF_KEYS, LOG2_E, filled_of, options_of


@triton.jit
@no_type_check
def _sharer(index, one, every, count):
    """The example that is number `index` of those that share number `one` of an operand's."""
    return (index // every * count + one) * every + index % every


@triton.jit
@no_type_check
def attention_backward_slopes(
    q, k, v, bias, mask, alibi_slopes, query_segments, key_segments, lengths, offset, dropout_keys, kept,
    out, lse, dout, dlse,
    dq, dk, dv, dbias, dmask, dalibi_slopes, dquery_segments, dkey_segments, dlengths, doffset, ddropout_keys, dkept,
    sums, delta, of_slopes,
    batch, queries, keys, heads, kv_heads, kv_batch, scale,
    bias_every, bias_batch, bias_heads, mask_every, mask_batch, mask_heads, slopes_every, slopes_batch,
    query_segments_every, query_segments_batch, key_segments_every, key_segments_batch,
    lengths_every, lengths_batch, offset_every, offset_batch,
    dropout_keys_every, dropout_keys_batch, kept_every, kept_batch,
    SIZE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, DROPOUT: tl.constexpr, KEEP: tl.constexpr, HAS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """The gradient of one slope, of the parts that the kernel of queries leaves. Grid: `(slopes_batch * heads,)`."""
    slope = tl.program_id(0)
    blocks = tl.cdiv(queries, BLOCK_QUERIES)
    columns = tl.arange(0, 128)
    total = tl.zeros([128], tl.float32)
    for sharer in range(0, batch // slopes_batch):
        example = _sharer(sharer, slope // heads, slopes_every, slopes_batch)
        at = first_element(example, heads, slope % heads, blocks, 0, 1)
        for block in range(0, blocks, 128):
            total += tl.load(of_slopes + at + block + columns, mask=block + columns < blocks, other=0.0)
    tl.store(dalibi_slopes + slope, tl.sum(total))


@triton.jit
@no_type_check
def attention_backward_bias(
    q, k, v, bias, mask, alibi_slopes, query_segments, key_segments, lengths, offset, dropout_keys, kept,
    out, lse, dout, dlse,
    dq, dk, dv, dbias, dmask, dalibi_slopes, dquery_segments, dkey_segments, dlengths, doffset, ddropout_keys, dkept,
    sums, delta, of_slopes,
    batch, queries, keys, heads, kv_heads, kv_batch, scale,
    bias_every, bias_batch, bias_heads, mask_every, mask_batch, mask_heads, slopes_every, slopes_batch,
    query_segments_every, query_segments_batch, key_segments_every, key_segments_batch,
    lengths_every, lengths_batch, offset_every, offset_batch,
    dropout_keys_every, dropout_keys_batch, kept_every, kept_batch,
    SIZE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, DROPOUT: tl.constexpr, KEEP: tl.constexpr, HAS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """`dbias` of one block of pairs. Grid: the blocks of queries, times those of keys, times `bias_heads * bias_batch`.

    If queries share a row, a program adds up all of their blocks, and the grid is that of one.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(keys, BLOCK_KEYS)
    first_key = program % blocks * BLOCK_KEYS
    program //= blocks
    blocks = tl.cdiv(queries, BLOCK_QUERIES)
    first = 0 if HAS & BIAS_OF_KEYS else program % blocks * BLOCK_QUERIES
    program = program if HAS & BIAS_OF_KEYS else program // blocks
    bias_head, bias_example = program % bias_heads, program // bias_heads
    rows = tl.arange(0, BLOCK_QUERIES)
    query, key = (first + rows)[:, None], first_key + tl.arange(0, BLOCK_KEYS)[None, :]
    left = queries - first
    gradient = tl.zeros([BLOCK_QUERIES, BLOCK_KEYS], tl.float32)
    group = heads // bias_heads
    sharers = group * (batch // bias_batch)
    for turn in range(0, sharers * blocks if HAS & BIAS_OF_KEYS else sharers):
        sharer = turn
        if HAS & BIAS_OF_KEYS:
            sharer = turn // blocks
            first = turn % blocks * BLOCK_QUERIES
            query = (first + rows)[:, None]
            left = queries - first
        # A bias is of one head or of all.
        head = bias_head + sharer % group
        example = _sharer(sharer // group, bias_example, bias_every, bias_batch)
        # fmt: off
        options = options_of(
            example, head, queries, keys, heads,
            bias, mask, alibi_slopes, query_segments, key_segments, lengths, offset, dropout_keys, kept,
            bias_every, bias_batch, bias_heads, mask_every, mask_batch, mask_heads, slopes_every, slopes_batch,
            query_segments_every, query_segments_batch, key_segments_every, key_segments_batch,
            lengths_every, lengths_batch, offset_every, offset_batch,
            dropout_keys_every, dropout_keys_batch, kept_every, kept_batch, HAS)
        # fmt: on
        at = first_element(example, queries, first, heads, head, SIZE)
        at_kv = first_element(example % kv_batch, keys, first_key, kv_heads, head // (heads // kv_heads), SIZE)
        left_keys = filled_of(options) - first_key
        q_main, q_tail = load(q + at, heads * SIZE, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
        dout_main, dout_tail = load(dout + at, heads * SIZE, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
        k_main, k_tail = load(k + at_kv, kv_heads * SIZE, left_keys, BLOCK_KEYS, SIZE, MAIN, TAIL)
        v_main, v_tail = load(v + at_kv, kv_heads * SIZE, left_keys, BLOCK_KEYS, SIZE, MAIN, TAIL)
        statistics = first_element(example, heads, head, queries, first, 1) + rows
        of_rows = tl.load(sums + statistics, mask=rows < left, other=float("inf")) * LOG2_E
        deltas = tl.load(delta + statistics, mask=rows < left, other=0.0)
        # fmt: off
        weights, _ = weights_of(
            inner(q_main, q_tail, k_main, k_tail, TAIL), query, key, of_rows[:, None], options, queries, keys,
            scale * LOG2_E, CAUSAL, WINDOW, SOFT_CAP, HAS, True)
        gradient += dlogits_of(
            weights, inner(dout_main, dout_tail, v_main, v_tail, TAIL), deltas[:, None], query, key, options, queries, keys,
            DROPOUT, KEEP, HAS)
        # fmt: on
    at = (tl.cast(bias_example, tl.int64) * bias_heads + bias_head) * keys
    if HAS & BIAS_OF_KEYS:
        columns = first_key + tl.arange(0, BLOCK_KEYS)
        tl.store(dbias + at + columns, tl.sum(gradient, 0).to(dbias.dtype.element_ty), mask=columns < keys)
    else:
        inside = (query < queries) & (key < keys)
        to = dbias + at * queries + (tl.cast(query, tl.int64) * keys + key)
        tl.store(to, gradient.to(dbias.dtype.element_ty), mask=inside)
