"""The gradients of attention, from tiles that the tensor memory accelerator (TMA) copies.

As in `_triton_backward.py`, whose kernel of rows runs first: the kernels below stand in the places of those of keys and of
queries, have the same parameters, and give the same numbers, bit by bit in the same tiles. Of the options they have `causal`
alone. How tiles are copied, and which warps do that, is in `_triton_forward_tma.py`.

There is one loop for all blocks here as well, so that under `causal` each pair is asked whether it is seen.
"""

# As in `_triton_forward.py`, whose functions these call.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from ._triton_forward import first_element, inner, outer, place, store, zeros
from ._triton_forward_tma import copy, descriptors
from ._triton_pairs import LOG2_E, key_range, query_range


@triton.jit
@no_type_check
def _of_all_heads(pointer, batch, count, heads, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """A descriptor for tiles of `ROWS` rows of any head of any example."""
    stride = heads * SIZE
    of_example = tl.cast(count, tl.int64) * stride
    return tl.make_tensor_descriptor(
        pointer, [batch, heads, count, SIZE], [of_example, SIZE, stride, 1], [1, 1, ROWS, WIDTH]
    )


@triton.jit
@no_type_check
def _copy_of(main, tail, example, head, first, ROWS: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """The two tiles from row `first` of a head on."""
    block = main.load([example, head, first, 0]).reshape(ROWS, MAIN)
    return block, tail.load([example, head, first, MAIN]).reshape(ROWS, TAIL) if TAIL else block


@triton.jit
@no_type_check
def attention_backward_keys_tma(
    q, k, v, bias, mask, alibi_slopes, query_segments, key_segments, lengths, offset, dropout_keys, kept,
    out, lse, dout, dlse,
    dq, dk, dv, dbias, dmask, dalibi_slopes, dquery_segments, dkey_segments, dlengths, doffset, ddropout_keys, dkept,
    sums, delta, of_slopes, dq_sums,
    batch, queries, keys, heads, kv_heads, kv_batch, scale,
    bias_every, bias_batch, bias_heads, mask_every, mask_batch, mask_heads, slopes_every, slopes_batch,
    query_segments_every, query_segments_batch, key_segments_every, key_segments_batch,
    lengths_every, lengths_batch, offset_every, offset_batch,
    dropout_keys_every, dropout_keys_batch, kept_every, kept_batch,
    SIZE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """`dk` and `dv` of one block of keys of one of *their* heads. Grid: `(cdiv(keys, BLOCK_KEYS) * kv_heads * kv_batch,)`."""
    first, kv_head, kv_example = place(keys, kv_heads, BLOCK_KEYS, False)
    at_kv, kv_stride = first_element(kv_example, keys, 0, kv_heads, kv_head, SIZE), kv_heads * SIZE
    of_k, of_k_tail = descriptors(k + at_kv, keys, kv_stride, BLOCK_KEYS, SIZE, MAIN, TAIL)
    of_v, of_v_tail = descriptors(v + at_kv, keys, kv_stride, BLOCK_KEYS, SIZE, MAIN, TAIL)
    k_main, k_tail = copy(of_k, of_k_tail, first, MAIN, TAIL)
    v_main, v_tail = copy(of_v, of_v_tail, first, MAIN, TAIL)
    k_sums, k_sums_tail = zeros(BLOCK_KEYS, MAIN, TAIL)
    v_sums, v_sums_tail = zeros(BLOCK_KEYS, MAIN, TAIL)
    start = keys - queries
    begin, _, _, stop = query_range(first, start, keys, queries, CAUSAL, 0, False, BLOCK_QUERIES, BLOCK_KEYS)
    of_q = _of_all_heads(q, batch, queries, heads, BLOCK_QUERIES, SIZE, MAIN)
    of_q_tail = _of_all_heads(q, batch, queries, heads, BLOCK_QUERIES, SIZE, TAIL) if TAIL else of_q
    of_dout = _of_all_heads(dout, batch, queries, heads, BLOCK_QUERIES, SIZE, MAIN)
    of_dout_tail = _of_all_heads(dout, batch, queries, heads, BLOCK_QUERIES, SIZE, TAIL) if TAIL else of_dout
    padded = tl.cdiv(queries, ALIGNED) * ALIGNED
    of_sums = tl.make_tensor_descriptor(sums, [batch * heads, queries], [padded, 1], [1, BLOCK_QUERIES])
    of_delta = tl.make_tensor_descriptor(delta, [batch * heads, queries], [padded, 1], [1, BLOCK_QUERIES])
    # One loop over the heads that share the keys and over their queries: Triton gives warps different work in no inner loop.
    group = heads // kv_heads
    steps = tl.maximum(tl.cdiv(stop - begin, BLOCK_QUERIES), 0)
    for step in tl.range(0, steps * group * (batch // kv_batch), warp_specialize=True):
        sharer, at = step // steps, begin + step % steps * BLOCK_QUERIES
        head = kv_head * group + sharer % group
        example = kv_example + sharer // group * kv_batch
        # Rows past the end are zeros all through, and add nothing whatever their weights are.
        q_main, q_tail = _copy_of(of_q, of_q_tail, example, head, at, BLOCK_QUERIES, MAIN, TAIL)
        products = inner(k_main, k_tail, q_main, q_tail, TAIL)
        of_rows = of_sums.load([example * heads + head, at]).reshape(BLOCK_QUERIES) * LOG2_E
        relative = products * (scale * LOG2_E) - of_rows[None, :]
        if CAUSAL:
            # Not `key <= query + start`, which would need a sum for each column.
            distance = first + tl.arange(0, BLOCK_KEYS) - (start + at)
            relative = tl.where(distance[:, None] <= tl.arange(0, BLOCK_QUERIES)[None, :], relative, float("-inf"))
        weights = tl.exp2(relative)
        dout_main, dout_tail = _copy_of(of_dout, of_dout_tail, example, head, at, BLOCK_QUERIES, MAIN, TAIL)
        v_sums, v_sums_tail = outer(weights, dout_main, dout_tail, v_sums, v_sums_tail, TAIL)
        deltas = of_delta.load([example * heads + head, at]).reshape(BLOCK_QUERIES)
        dlogits = weights * (inner(v_main, v_tail, dout_main, dout_tail, TAIL) - deltas[None, :])
        k_sums, k_sums_tail = outer(dlogits, q_main, q_tail, k_sums, k_sums_tail, TAIL)
    at, left = at_kv + tl.cast(first, tl.int64) * kv_stride, keys - first
    if dk is not None:
        store(dk + at, k_sums * scale, k_sums_tail * scale, kv_stride, left, BLOCK_KEYS, SIZE, MAIN, TAIL)
    if dv is not None:
        store(dv + at, v_sums, v_sums_tail, kv_stride, left, BLOCK_KEYS, SIZE, MAIN, TAIL)


@triton.jit
@no_type_check
def attention_backward_queries_tma(
    q, k, v, bias, mask, alibi_slopes, query_segments, key_segments, lengths, offset, dropout_keys, kept,
    out, lse, dout, dlse,
    dq, dk, dv, dbias, dmask, dalibi_slopes, dquery_segments, dkey_segments, dlengths, doffset, ddropout_keys, dkept,
    sums, delta, of_slopes, dq_sums,
    batch, queries, keys, heads, kv_heads, kv_batch, scale,
    bias_every, bias_batch, bias_heads, mask_every, mask_batch, mask_heads, slopes_every, slopes_batch,
    query_segments_every, query_segments_batch, key_segments_every, key_segments_batch,
    lengths_every, lengths_batch, offset_every, offset_batch,
    dropout_keys_every, dropout_keys_batch, kept_every, kept_batch,
    SIZE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`dq` of one block of queries of one head. Grid: `(cdiv(queries, BLOCK_QUERIES) * heads * batch,)`.

    `MASKED`: some pairs of a query and a key are not seen, or the last block of keys is not full.
    """
    first, head, example = place(queries, heads, BLOCK_QUERIES, CAUSAL)
    at_q, stride = first_element(example, queries, 0, heads, head, SIZE), heads * SIZE
    at_kv = first_element(example % kv_batch, keys, 0, kv_heads, head // (heads // kv_heads), SIZE)
    of_q, of_q_tail = descriptors(q + at_q, queries, stride, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    of_dout, of_dout_tail = descriptors(dout + at_q, queries, stride, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    of_k, of_k_tail = descriptors(k + at_kv, keys, kv_heads * SIZE, BLOCK_KEYS, SIZE, MAIN, TAIL)
    of_v, of_v_tail = descriptors(v + at_kv, keys, kv_heads * SIZE, BLOCK_KEYS, SIZE, MAIN, TAIL)
    q, q_tail = copy(of_q, of_q_tail, first, MAIN, TAIL)
    dout, dout_tail = copy(of_dout, of_dout_tail, first, MAIN, TAIL)
    rows, left = tl.arange(0, BLOCK_QUERIES), queries - first
    padded = tl.cdiv(queries, ALIGNED) * ALIGNED
    here = first_element(example, heads, head, padded, 0, 1)
    # Copied like tiles: Triton takes an ordinary load for one of those that some warps make for others, and ends in an error.
    of_rows = tl.make_tensor_descriptor(sums + here, [queries], [1], [BLOCK_QUERIES]).load([first]) * LOG2_E
    deltas = tl.make_tensor_descriptor(delta + here, [queries], [1], [BLOCK_QUERIES]).load([first])
    gradient, gradient_tail = zeros(BLOCK_QUERIES, MAIN, TAIL)
    start = keys - queries
    # The last key that a query sees.
    last = first + rows + start if CAUSAL else tl.full([BLOCK_QUERIES], keys - 1, tl.int32)
    _, _, _, stop = key_range(first, first + (BLOCK_QUERIES - 1), start, keys, CAUSAL, 0, BLOCK_KEYS)
    for at in tl.range(0, stop, BLOCK_KEYS, warp_specialize=True):
        k_main, k_tail = copy(of_k, of_k_tail, at, MAIN, TAIL)
        v_main, v_tail = copy(of_v, of_v_tail, at, MAIN, TAIL)
        relative = inner(q, q_tail, k_main, k_tail, TAIL) * (scale * LOG2_E) - of_rows[:, None]
        if MASKED:
            relative = tl.where(tl.arange(0, BLOCK_KEYS)[None, :] <= (last - at)[:, None], relative, float("-inf"))
        dweights = inner(dout, dout_tail, v_main, v_tail, TAIL)
        dlogits = tl.exp2(relative) * (dweights - deltas[:, None])
        gradient, gradient_tail = outer(dlogits, k_main, k_tail, gradient, gradient_tail, TAIL)
    at = at_q + tl.cast(first, tl.int64) * stride
    store(dq + at, gradient * scale, gradient_tail * scale, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
