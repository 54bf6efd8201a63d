"""The gradients of attention in Triton. Shapes, dtypes and the mask are those of `_triton_forward.py`.

Three kernels run one after the other, with the same parameters: operands, `out` and `dout` of the forward kernel, a gradient for
each operand, and two workspaces, f32 of shape `(batch, heads, queries)`, which are written by the first kernel and read by the
others:

    lse    the logarithm of the sum of exp(logits) of a query, the logits with their scale; -inf where it sees no key
    delta  the sum of dout * out of a query, which is the sum of weights * dweights

A gradient that is not needed is `None`. The kernel of keys runs if `dk` or `dv` is needed, that of queries if `dq` is.

With `lse` and `delta` the weights are `exp(logits - lse)`, `dlogits = weights * (dweights - delta)`, and a block needs to know no
other one. A forward kernel that keeps `lse` can take the place of one half of the first kernel.

Gradients of shared heads and examples are summed by one program, in one order: there are no atomics, and results do not depend on
which program is first. `dlogits` are rounded to the operands' dtype for their product with `q` and `k`; sums are f32.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from ._triton_forward import (
    LOG2_E,
    first_element,
    inner,
    is_seen,
    key_range,
    load,
    outer,
    place,
    softmax_step,
    store,
    zeros,
)


LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
@no_type_check
def _visit_rows(
    top,
    total,
    q,
    q_tail,
    k,
    first,
    start,
    stop,
    queries,
    keys,
    stride,
    scale,
    SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEGATIVE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    query = first + tl.arange(0, BLOCK_QUERIES)[:, None]
    if start < stop:  # as in _triton_forward.py
        for at in range(start, stop, BLOCK_KEYS):
            at_k = k + tl.cast(at, tl.int64) * stride
            block, block_tail = load(at_k, stride, keys - at, BLOCK_KEYS, SIZE, MAIN, TAIL, not MASKED)
            products = inner(q, q_tail, block, block_tail, TAIL)
            seen = is_seen(query, at + tl.arange(0, BLOCK_KEYS)[None, :], queries, keys, CAUSAL)
            _, _, top, total = softmax_step(products, seen, top, total, scale, NEGATIVE, MASKED)
    return top, total


@triton.jit
@no_type_check
def attention_backward_rows(
    q, k, v, bias, mask, alibi_slopes, query_segments, key_segments, lengths, offset, dropout_keys, kept,
    out, dout,
    dq, dk, dv, dbias, dmask, dalibi_slopes, dquery_segments, dkey_segments, dlengths, doffset, ddropout_keys, dkept,
    lse, delta,
    batch, queries, keys, heads, kv_heads, kv_batch, scale,
    SIZE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """`lse` and `delta` of one block of queries. Grid: `(cdiv(queries, BLOCK_QUERIES) * heads * batch,)`."""
    first, head, example = place(queries, heads, BLOCK_QUERIES, CAUSAL)
    at = first_element(example, queries, first, heads, head, SIZE)
    stride, left = heads * SIZE, queries - first
    out_main, out_tail = load(out + at, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    dout_main, dout_tail = load(dout + at, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    sums = tl.sum(out_main.to(tl.float32) * dout_main.to(tl.float32), 1)
    if TAIL:
        sums += tl.sum(out_tail.to(tl.float32) * dout_tail.to(tl.float32), 1)
    q, q_tail = load(q + at, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    at_k = first_element(example % kv_batch, keys, 0, kv_heads, head // (heads // kv_heads), SIZE)
    top = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    whole, stop = key_range(first, queries, keys, CAUSAL, BLOCK_QUERIES, BLOCK_KEYS)
    # fmt: off
    top, total = _visit_rows(
        top, total, q, q_tail, k + at_k, first, 0, whole, queries, keys, kv_heads * SIZE, scale * LOG2_E,
        SIZE, MAIN, TAIL, CAUSAL, NEGATIVE, BLOCK_QUERIES, BLOCK_KEYS, False)
    top, total = _visit_rows(
        top, total, q, q_tail, k + at_k, first, whole, stop, queries, keys, kv_heads * SIZE, scale * LOG2_E,
        SIZE, MAIN, TAIL, CAUSAL, NEGATIVE, BLOCK_QUERIES, BLOCK_KEYS, True)
    # fmt: on
    rows = tl.arange(0, BLOCK_QUERIES)
    statistics = first_element(example, heads, head, queries, first, 1)
    logarithm = tl.where(total == 0, float("-inf"), top * LOG_2 + tl.log(tl.where(total == 0, 1.0, total)))
    tl.store(lse + statistics + rows, logarithm, mask=rows < left)
    tl.store(delta + statistics + rows, sums, mask=rows < left)


@triton.jit
@no_type_check
def _weights(products, lse, seen, scale, MASKED: tl.constexpr):
    """Both `scale` and `lse` are for exponents of two."""
    exponents = products * scale - lse
    if MASKED:
        exponents = tl.where(seen, exponents, float("-inf"))
    return tl.exp2(exponents)


@triton.jit
@no_type_check
def _visit_keys(
    dk,
    dk_tail,
    dv,
    dv_tail,
    k,
    k_tail,
    v,
    v_tail,
    q,
    dout,
    lse,
    delta,
    first,
    start,
    stop,
    queries,
    keys,
    stride,
    scale,
    SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    key = first + tl.arange(0, BLOCK_KEYS)[:, None]
    for at in range(start, stop, BLOCK_QUERIES):
        step, left = tl.cast(at, tl.int64) * stride, queries - at
        rows = tl.arange(0, BLOCK_QUERIES)
        # Rows past the end are zeros all through, and add nothing whatever their weights are.
        q_main, q_tail = load(q + step, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
        sums = tl.load(lse + at + rows, mask=rows < left, other=0.0)
        products = inner(k, k_tail, q_main, q_tail, TAIL)
        seen = is_seen((at + rows)[None, :], key, queries, keys, CAUSAL)
        weights = _weights(products, sums[None, :] * LOG2_E, seen, scale, MASKED)
        dout_main, dout_tail = load(dout + step, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
        dv, dv_tail = outer(weights, dout_main, dout_tail, dv, dv_tail, TAIL)
        deltas = tl.load(delta + at + rows, mask=rows < left, other=0.0)
        dlogits = weights * (inner(v, v_tail, dout_main, dout_tail, TAIL) - deltas[None, :])
        dk, dk_tail = outer(dlogits, q_main, q_tail, dk, dk_tail, TAIL)
    return dk, dk_tail, dv, dv_tail


@triton.jit
@no_type_check
def attention_backward_keys(
    q, k, v, bias, mask, alibi_slopes, query_segments, key_segments, lengths, offset, dropout_keys, kept,
    out, dout,
    dq, dk, dv, dbias, dmask, dalibi_slopes, dquery_segments, dkey_segments, dlengths, doffset, ddropout_keys, dkept,
    lse, delta,
    batch, queries, keys, heads, kv_heads, kv_batch, scale,
    SIZE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """`dk` and `dv` of one block of keys of one of *their* heads. Grid: `(cdiv(keys, BLOCK_KEYS) * kv_heads * kv_batch,)`."""
    # The first keys are seen by the most queries, and go first by themselves.
    first, kv_head, kv_example = place(keys, kv_heads, BLOCK_KEYS, False)
    at, left = first_element(kv_example, keys, first, kv_heads, kv_head, SIZE), keys - first
    k_main, k_tail = load(k + at, kv_heads * SIZE, left, BLOCK_KEYS, SIZE, MAIN, TAIL)
    v_main, v_tail = load(v + at, kv_heads * SIZE, left, BLOCK_KEYS, SIZE, MAIN, TAIL)
    k_sums, k_sums_tail = zeros(BLOCK_KEYS, MAIN, TAIL)
    v_sums, v_sums_tail = zeros(BLOCK_KEYS, MAIN, TAIL)
    # Queries before `start` see none of these keys, those from `whole` on see all.
    start = 0
    whole = 0
    if CAUSAL:
        start = tl.maximum(first + queries - keys, 0) // BLOCK_QUERIES * BLOCK_QUERIES
        whole = tl.cdiv(tl.maximum(first + BLOCK_KEYS - 1 + queries - keys, 0), BLOCK_QUERIES) * BLOCK_QUERIES
        whole = tl.minimum(whole, tl.cdiv(queries, BLOCK_QUERIES) * BLOCK_QUERIES)
    group = heads // kv_heads
    for sharer in range(0, group * (batch // kv_batch)):
        head = kv_head * group + sharer % group
        example = kv_example + sharer // group * kv_batch
        at_q = first_element(example, queries, 0, heads, head, SIZE)
        statistics = first_element(example, heads, head, queries, 0, 1)
        # fmt: off
        if CAUSAL:
            k_sums, k_sums_tail, v_sums, v_sums_tail = _visit_keys(
        k_sums, k_sums_tail, v_sums, v_sums_tail, k_main, k_tail, v_main, v_tail,
            q + at_q, dout + at_q, lse + statistics, delta + statistics,
            first, start, whole, queries, keys, heads * SIZE, scale * LOG2_E,
            SIZE, MAIN, TAIL, CAUSAL, BLOCK_QUERIES, BLOCK_KEYS, True)
        k_sums, k_sums_tail, v_sums, v_sums_tail = _visit_keys(
            k_sums, k_sums_tail, v_sums, v_sums_tail, k_main, k_tail, v_main, v_tail,
            q + at_q, dout + at_q, lse + statistics, delta + statistics,
            first, whole, queries, queries, keys, heads * SIZE, scale * LOG2_E,
            SIZE, MAIN, TAIL, CAUSAL, BLOCK_QUERIES, BLOCK_KEYS, False)
        # fmt: on
    if dk is not None:
        store(dk + at, k_sums * scale, k_sums_tail * scale, kv_heads * SIZE, left, BLOCK_KEYS, SIZE, MAIN, TAIL)
    if dv is not None:
        store(dv + at, v_sums, v_sums_tail, kv_heads * SIZE, left, BLOCK_KEYS, SIZE, MAIN, TAIL)


@triton.jit
@no_type_check
def _visit_queries(
    dq,
    dq_tail,
    q,
    q_tail,
    dout,
    dout_tail,
    k,
    v,
    lse,
    delta,
    first,
    start,
    stop,
    queries,
    keys,
    stride,
    scale,
    SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    query = first + tl.arange(0, BLOCK_QUERIES)[:, None]
    if start < stop:  # as in _triton_forward.py
        for at in range(start, stop, BLOCK_KEYS):
            step, left = tl.cast(at, tl.int64) * stride, keys - at
            k_main, k_tail = load(k + step, stride, left, BLOCK_KEYS, SIZE, MAIN, TAIL, not MASKED)
            v_main, v_tail = load(v + step, stride, left, BLOCK_KEYS, SIZE, MAIN, TAIL, not MASKED)
            products = inner(q, q_tail, k_main, k_tail, TAIL)
            seen = is_seen(query, at + tl.arange(0, BLOCK_KEYS)[None, :], queries, keys, CAUSAL)
            weights = _weights(products, lse[:, None], seen, scale, MASKED)
            dlogits = weights * (inner(dout, dout_tail, v_main, v_tail, TAIL) - delta[:, None])
            dq, dq_tail = outer(dlogits, k_main, k_tail, dq, dq_tail, TAIL)
    return dq, dq_tail


@triton.jit
@no_type_check
def attention_backward_queries(
    q, k, v, bias, mask, alibi_slopes, query_segments, key_segments, lengths, offset, dropout_keys, kept,
    out, dout,
    dq, dk, dv, dbias, dmask, dalibi_slopes, dquery_segments, dkey_segments, dlengths, doffset, ddropout_keys, dkept,
    lse, delta,
    batch, queries, keys, heads, kv_heads, kv_batch, scale,
    SIZE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """`dq` of one block of queries of one head. Grid: `(cdiv(queries, BLOCK_QUERIES) * heads * batch,)`."""
    first, head, example = place(queries, heads, BLOCK_QUERIES, CAUSAL)
    at = first_element(example, queries, first, heads, head, SIZE)
    stride, left = heads * SIZE, queries - first
    q, q_tail = load(q + at, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    dout, dout_tail = load(dout + at, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    rows = tl.arange(0, BLOCK_QUERIES)
    statistics = first_element(example, heads, head, queries, first, 1)
    sums = tl.load(lse + statistics + rows, mask=rows < left, other=0.0) * LOG2_E
    deltas = tl.load(delta + statistics + rows, mask=rows < left, other=0.0)
    kv_head = head // (heads // kv_heads)
    at_kv = first_element(example % kv_batch, keys, 0, kv_heads, kv_head, SIZE)
    gradient, gradient_tail = zeros(BLOCK_QUERIES, MAIN, TAIL)
    whole, stop = key_range(first, queries, keys, CAUSAL, BLOCK_QUERIES, BLOCK_KEYS)
    # fmt: off
    gradient, gradient_tail = _visit_queries(
        gradient, gradient_tail, q, q_tail, dout, dout_tail, k + at_kv, v + at_kv, sums, deltas,
        first, 0, whole, queries, keys, kv_heads * SIZE, scale * LOG2_E,
        SIZE, MAIN, TAIL, CAUSAL, BLOCK_QUERIES, BLOCK_KEYS, False)
    gradient, gradient_tail = _visit_queries(
        gradient, gradient_tail, q, q_tail, dout, dout_tail, k + at_kv, v + at_kv, sums, deltas,
        first, whole, stop, queries, keys, kv_heads * SIZE, scale * LOG2_E,
        SIZE, MAIN, TAIL, CAUSAL, BLOCK_QUERIES, BLOCK_KEYS, True)
    # fmt: on
    if dq is not None:
        store(dq + at, gradient * scale, gradient_tail * scale, stride, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
