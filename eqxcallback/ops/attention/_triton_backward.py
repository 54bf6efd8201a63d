"""The gradients of attention in Triton. Shapes, dtypes and the mask are those of `_triton_forward.py`.

Kernels run one after the other, with the same parameters: operands, results and their cotangents, a gradient for each operand,
and workspaces in f32, of which the first two have the shape `(batch, heads, queries)`. The kernel of rows writes these, and the
others read them:

    sums      `lse` of a query; inf where it sees no key
    delta     the sum of dout * out of a query, which is the sum of weights * dweights, less the cotangent of `lse`
    of_slopes the gradient of a slope, of each block of queries

A gradient that is not needed is `None`, and a kernel runs if one of its own is needed: that of keys has `dk` and `dv`, that of
queries has `dq` and the parts of a slope's gradient, that of slopes adds up these, and that of bias has `dbias`: these two are in
`_triton_backward_options.py`.

With `sums` and `delta` the weights are `exp(logits - sums)`, `dlogits = weights * (dweights - delta)`, and a block needs to know
no other one.

Gradients of what is shared by heads and examples are summed by one program, in one order: results do not depend on which program
is first. The kernel of queries multiplies anew what that of keys has multiplied: seven products. `dlogits` are rounded to the
operands' dtype for their product with `q` and `k`; sums are f32.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from ._triton_forward import first_element, inner, load, outer, place, store, zeros
from ._triton_pairs import (
    BIAS_OF_KEYS,
    LENGTHS,
    LOG2_E,
    MASK,
    SEGMENTS,
    SLOPES,
    dropped,
    exponents,
    filled_of,
    is_seen,
    key_range,
    keys_within_segments,
    options_of,
    queries_within_segments,
    query_range,
    start_of,
)


@triton.jit
@no_type_check
def attention_backward_rows(
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
    """`sums` and `delta` of one block of queries. Grid: `(cdiv(queries, BLOCK_QUERIES) * heads * batch,)`."""
    first, head, example = place(queries, heads, BLOCK_QUERIES, False)
    at = first_element(example, queries, first, heads, head, SIZE)
    stride, left = heads * SIZE, queries - first
    out_main, out_tail = load(out + at, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    dout_main, dout_tail = load(dout + at, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    products = tl.sum(out_main.to(tl.float32) * dout_main.to(tl.float32), 1)
    if TAIL:
        products += tl.sum(out_tail.to(tl.float32) * dout_tail.to(tl.float32), 1)
    rows = tl.arange(0, BLOCK_QUERIES)
    here = first_element(example, queries, first, heads, head, 1) + rows * heads
    logarithms = tl.load(lse + here, mask=rows < left, other=0.0)
    products -= tl.load(dlse + here, mask=rows < left, other=0.0)
    there = first_element(example, heads, head, queries, first, 1) + rows
    # No weight is left of exponents that are -inf, which minus -inf would be NaN.
    tl.store(sums + there, tl.where(logarithms == float("-inf"), float("inf"), logarithms), mask=rows < left)
    tl.store(delta + there, products, mask=rows < left)


@triton.jit
@no_type_check
def weights_of(
    products, query, key, sums, options, queries, keys, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the weights, and the tangents of a soft cap. Both `scale` and `sums` are for exponents of two."""
    logits, tangents = exponents(products, query, key, options, queries, keys, scale, SOFT_CAP, HAS)
    relative = logits - sums
    if MASKED:
        seen = is_seen(query, key, options, queries, keys, CAUSAL, WINDOW, HAS)
        relative = tl.where(seen, relative, float("-inf"))
    return tl.exp2(relative), tangents


@triton.jit
@no_type_check
def dlogits_of(
    weights, dweights, delta, query, key, options, queries, keys,
    DROPOUT: tl.constexpr, KEEP: tl.constexpr, HAS: tl.constexpr,
):  # fmt: skip
    return weights * (dropped(dweights, query, key, options, queries, keys, DROPOUT, KEEP, HAS) - delta)


@triton.jit
@no_type_check
def _before_the_cap(dlogits, tangents, SOFT_CAP: tl.constexpr):
    return dlogits * (1 - tangents * tangents) if SOFT_CAP != 0 else dlogits


@triton.jit
@no_type_check
def _visit_keys(
    dk, dk_tail, dv, dv_tail, k, k_tail, v, v_tail, q, dout, sums, delta, first, start, stop,
    queries, keys, stride, scale, options,
    SIZE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, DROPOUT: tl.constexpr, KEEP: tl.constexpr, HAS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    key = first + tl.arange(0, BLOCK_KEYS)[:, None]
    for at in range(start, stop, BLOCK_QUERIES):
        step, left = tl.cast(at, tl.int64) * stride, queries - at
        rows = tl.arange(0, BLOCK_QUERIES)
        query = (at + rows)[None, :]
        # Rows past the end are zeros all through, and add nothing whatever their weights are, unless slopes, or a bias of keys
        # that these rows have too, make the weights infinite.
        q_main, q_tail = load(q + step, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
        of_rows = tl.load(
            sums + at + rows, mask=rows < left, other=float("inf") if HAS & (SLOPES | BIAS_OF_KEYS) else 0.0
        )
        products = inner(k, k_tail, q_main, q_tail, TAIL)
        # fmt: off
        weights, tangents = weights_of(
            products, query, key, of_rows[None, :] * LOG2_E, options, queries, keys, scale,
            CAUSAL, WINDOW, SOFT_CAP, HAS, MASKED)
        # fmt: on
        dout_main, dout_tail = load(dout + step, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
        kept = dropped(weights, query, key, options, queries, keys, DROPOUT, KEEP, HAS)
        dv, dv_tail = outer(kept, dout_main, dout_tail, dv, dv_tail, TAIL)
        deltas = tl.load(delta + at + rows, mask=rows < left, other=0.0)
        dweights = inner(v, v_tail, dout_main, dout_tail, TAIL)
        dlogits = dlogits_of(weights, dweights, deltas[None, :], query, key, options, queries, keys, DROPOUT, KEEP, HAS)
        dlogits = _before_the_cap(dlogits, tangents, SOFT_CAP)
        dk, dk_tail = outer(dlogits, q_main, q_tail, dk, dk_tail, TAIL)
    return dk, dk_tail, dv, dv_tail


@triton.jit
@no_type_check
def attention_backward_keys(
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
    """`dk` and `dv` of one block of keys of one of *their* heads. Grid: `(cdiv(keys, BLOCK_KEYS) * kv_heads * kv_batch,)`."""
    # The first keys are seen by the most queries, and go first by themselves.
    first, kv_head, kv_example = place(keys, kv_heads, BLOCK_KEYS, False)
    at, left = first_element(kv_example, keys, first, kv_heads, kv_head, SIZE), keys - first
    if not HAS & LENGTHS:
        k_main, k_tail = load(k + at, kv_heads * SIZE, left, BLOCK_KEYS, SIZE, MAIN, TAIL)
        v_main, v_tail = load(v + at, kv_heads * SIZE, left, BLOCK_KEYS, SIZE, MAIN, TAIL)
    k_sums, k_sums_tail = zeros(BLOCK_KEYS, MAIN, TAIL)
    v_sums, v_sums_tail = zeros(BLOCK_KEYS, MAIN, TAIL)
    group = heads // kv_heads
    for sharer in range(0, group * (batch // kv_batch)):
        head = kv_head * group + sharer % group
        example = kv_example + sharer // group * kv_batch
        # fmt: off
        options = options_of(
            example, head, queries, keys, heads,
            bias, mask, alibi_slopes, query_segments, key_segments, lengths, offset, dropout_keys, kept,
            bias_every, bias_batch, bias_heads, mask_every, mask_batch, mask_heads, slopes_every, slopes_batch,
            query_segments_every, query_segments_batch, key_segments_every, key_segments_batch,
            lengths_every, lengths_batch, offset_every, offset_batch,
            dropout_keys_every, dropout_keys_batch, kept_every, kept_batch, HAS)
        # fmt: on
        if HAS & LENGTHS:
            # What a length hides may be NaN, which a weight of zero does not hide; and each example has a length.
            filled = filled_of(options) - first
            k_main, k_tail = load(k + at, kv_heads * SIZE, filled, BLOCK_KEYS, SIZE, MAIN, TAIL)
            v_main, v_tail = load(v + at, kv_heads * SIZE, filled, BLOCK_KEYS, SIZE, MAIN, TAIL)
        at_q = first_element(example, queries, 0, heads, head, SIZE)
        statistics = first_element(example, heads, head, queries, 0, 1)
        # fmt: off
        begin, whole, end, stop = query_range(
            first, start_of(options), filled_of(options), queries, CAUSAL, WINDOW, HAS, BLOCK_QUERIES, BLOCK_KEYS)
        if HAS & SEGMENTS:
            begin, whole, end, stop = queries_within_segments(
                begin, whole, end, stop, first, keys, options, BLOCK_QUERIES, BLOCK_KEYS)
        if HAS & MASK:
            k_sums, k_sums_tail, v_sums, v_sums_tail = _visit_keys(
                k_sums, k_sums_tail, v_sums, v_sums_tail, k_main, k_tail, v_main, v_tail,
                q + at_q, dout + at_q, sums + statistics, delta + statistics, first, begin, stop,
                queries, keys, heads * SIZE, scale * LOG2_E, options,
                SIZE, MAIN, TAIL, CAUSAL, WINDOW, SOFT_CAP, DROPOUT, KEEP, HAS, BLOCK_QUERIES, BLOCK_KEYS, True)
        else:
            if CAUSAL or WINDOW or HAS & (LENGTHS | SEGMENTS):
                k_sums, k_sums_tail, v_sums, v_sums_tail = _visit_keys(
                    k_sums, k_sums_tail, v_sums, v_sums_tail, k_main, k_tail, v_main, v_tail,
                    q + at_q, dout + at_q, sums + statistics, delta + statistics, first, begin,
                    tl.minimum(whole, stop), queries, keys, heads * SIZE, scale * LOG2_E, options,
                    SIZE, MAIN, TAIL, CAUSAL, WINDOW, SOFT_CAP, DROPOUT, KEEP, HAS, BLOCK_QUERIES, BLOCK_KEYS, True)
            k_sums, k_sums_tail, v_sums, v_sums_tail = _visit_keys(
                k_sums, k_sums_tail, v_sums, v_sums_tail, k_main, k_tail, v_main, v_tail,
                q + at_q, dout + at_q, sums + statistics, delta + statistics, first, whole, end,
                queries, keys, heads * SIZE, scale * LOG2_E, options,
                SIZE, MAIN, TAIL, CAUSAL, WINDOW, SOFT_CAP, DROPOUT, KEEP, HAS, BLOCK_QUERIES, BLOCK_KEYS, False)
            if WINDOW or HAS & SEGMENTS:
                k_sums, k_sums_tail, v_sums, v_sums_tail = _visit_keys(
                    k_sums, k_sums_tail, v_sums, v_sums_tail, k_main, k_tail, v_main, v_tail,
                    q + at_q, dout + at_q, sums + statistics, delta + statistics, first, end, stop,
                    queries, keys, heads * SIZE, scale * LOG2_E, options,
                    SIZE, MAIN, TAIL, CAUSAL, WINDOW, SOFT_CAP, DROPOUT, KEEP, HAS, BLOCK_QUERIES, BLOCK_KEYS, True)
        # fmt: on
    if dk is not None:
        store(dk + at, k_sums * scale, k_sums_tail * scale, kv_heads * SIZE, left, BLOCK_KEYS, SIZE, MAIN, TAIL)
    if dv is not None:
        store(dv + at, v_sums, v_sums_tail, kv_heads * SIZE, left, BLOCK_KEYS, SIZE, MAIN, TAIL)


@triton.jit
@no_type_check
def _visit_queries(
    dq, dq_tail, of_slope, q, q_tail, dout, dout_tail, k, v, sums, delta, first, start, stop,
    queries, keys, stride, scale, options,
    SIZE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, DROPOUT: tl.constexpr, KEEP: tl.constexpr, HAS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    query = first + tl.arange(0, BLOCK_QUERIES)[:, None]
    if start < stop:  # as in _triton_forward.py
        for at in range(start, stop, BLOCK_KEYS):
            step, left = tl.cast(at, tl.int64) * stride, filled_of(options) - at
            key = at + tl.arange(0, BLOCK_KEYS)[None, :]
            k_main, k_tail = load(k + step, stride, left, BLOCK_KEYS, SIZE, MAIN, TAIL, not MASKED)
            v_main, v_tail = load(v + step, stride, left, BLOCK_KEYS, SIZE, MAIN, TAIL, not MASKED)
            products = inner(q, q_tail, k_main, k_tail, TAIL)
            # fmt: off
            weights, tangents = weights_of(
                products, query, key, sums[:, None], options, queries, keys, scale,
                CAUSAL, WINDOW, SOFT_CAP, HAS, MASKED)
            dlogits = dlogits_of(
                weights, inner(dout, dout_tail, v_main, v_tail, TAIL), delta[:, None], query, key, options, queries, keys,
                DROPOUT, KEEP, HAS)
            # fmt: on
            if SLOPED:
                of_slope -= tl.sum(dlogits * tl.abs(query + start_of(options) - key).to(tl.float32), 1)
            dq, dq_tail = outer(_before_the_cap(dlogits, tangents, SOFT_CAP), k_main, k_tail, dq, dq_tail, TAIL)
    return dq, dq_tail, of_slope


@triton.jit
@no_type_check
def attention_backward_queries(
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
    """`dq` of one block of queries of one head. Grid: `(cdiv(queries, BLOCK_QUERIES) * heads * batch,)`."""
    first, head, example = place(queries, heads, BLOCK_QUERIES, CAUSAL)
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
    stride, left = heads * SIZE, queries - first
    q, q_tail = load(q + at, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    dout, dout_tail = load(dout + at, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    rows = tl.arange(0, BLOCK_QUERIES)
    statistics = first_element(example, heads, head, queries, first, 1)
    of_rows = tl.load(sums + statistics + rows, mask=rows < left, other=float("inf")) * LOG2_E
    deltas = tl.load(delta + statistics + rows, mask=rows < left, other=0.0)
    kv_head = head // (heads // kv_heads)
    at_kv = first_element(example % kv_batch, keys, 0, kv_heads, kv_head, SIZE)
    gradient, gradient_tail = zeros(BLOCK_QUERIES, MAIN, TAIL)
    of_slope = tl.zeros([BLOCK_QUERIES], tl.float32)
    begin, whole, end, stop = key_range(
        first, first + (BLOCK_QUERIES - 1), start_of(options), filled_of(options), CAUSAL, WINDOW, BLOCK_KEYS
    )
    if HAS & SEGMENTS:
        begin, whole, end, stop = keys_within_segments(
            begin, whole, end, stop, first, first + (BLOCK_QUERIES - 1), queries, options, BLOCK_QUERIES, BLOCK_KEYS
        )
    # fmt: off
    if HAS & MASK:
        end = begin
    else:
        if WINDOW or HAS & SEGMENTS:
            gradient, gradient_tail, of_slope = _visit_queries(
                gradient, gradient_tail, of_slope, q, q_tail, dout, dout_tail, k + at_kv, v + at_kv, of_rows, deltas,
                first, begin, tl.minimum(whole, stop), queries, keys, kv_heads * SIZE, scale * LOG2_E, options, SIZE, MAIN, TAIL,
                CAUSAL, WINDOW, SOFT_CAP, DROPOUT, KEEP, HAS, BLOCK_QUERIES, BLOCK_KEYS, True, dalibi_slopes is not None)
        gradient, gradient_tail, of_slope = _visit_queries(
            gradient, gradient_tail, of_slope, q, q_tail, dout, dout_tail, k + at_kv, v + at_kv, of_rows, deltas,
            first, whole, end, queries, keys, kv_heads * SIZE, scale * LOG2_E, options, SIZE, MAIN, TAIL,
            CAUSAL, WINDOW, SOFT_CAP, DROPOUT, KEEP, HAS, BLOCK_QUERIES, BLOCK_KEYS, False, dalibi_slopes is not None)
    gradient, gradient_tail, of_slope = _visit_queries(
        gradient, gradient_tail, of_slope, q, q_tail, dout, dout_tail, k + at_kv, v + at_kv, of_rows, deltas,
        first, end, stop, queries, keys, kv_heads * SIZE, scale * LOG2_E, options, SIZE, MAIN, TAIL,
        CAUSAL, WINDOW, SOFT_CAP, DROPOUT, KEEP, HAS, BLOCK_QUERIES, BLOCK_KEYS, True, dalibi_slopes is not None)
    # fmt: on
    if dq is not None:
        store(dq + at, gradient * scale, gradient_tail * scale, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    if dalibi_slopes is not None:
        blocks = tl.cdiv(queries, BLOCK_QUERIES)
        tl.store(of_slopes + first_element(example, heads, head, blocks, first // BLOCK_QUERIES, 1), tl.sum(of_slope))
