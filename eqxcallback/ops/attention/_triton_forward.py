"""Attention in Triton: what the kernels share, and the forward kernel.

`q` is `(batch, queries, heads, size)`, `k` and `v` are `(kv_batch, keys, kv_heads, size)`, all contiguous. Query head `h` of
example `b` uses head `h // (heads // kv_heads)` of example `b % kv_batch`. What else the op has is in `_triton_pairs.py`. A query
that sees no key gives zeros, and so do its gradients.

Kernels write `lse` too, of shape `(batch, queries, heads)`: the natural logarithm of the sum of the exponentials of a query's
logits, -inf where it sees no key.

Operands are f32, f16 or bf16; products are added up in f32, and softmax is in f32, with exponents of two. Weights are rounded to
the operands' dtype for the second product. f32 is multiplied as it is, not as tf32.

The head size is a constant of the program, in two tiles of `MAIN` and `TAIL` columns: 80 = 64 + 16 and 96 = 64 + 32. One tile of
128 would make tensor cores and shared memory do 60% and 33% more. `_triton_tiles.split` chooses.

Offsets of tiles are 64-bit, those within a tile 32-bit. The source of the method is FlashAttention-2, arXiv:2307.08691.
"""

# Triton reads the text of these functions and gives its own meaning to constexpr, ranges and arithmetic of tensors. It finds what
# they name beside the very function that it gets, so nothing may wrap that to check its types.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from ._triton_pairs import (
    BIAS,
    LOG2_E,
    LOG_2,
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
    start_of,
)


@triton.jit
@no_type_check
def place(count, heads, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """The first row, the head and the example of this program.

    Blocks of a head are neighbours, so that programs that run together find its keys and values in the L2 cache. Under causal,
    the last block of queries sees the most keys: it goes first, and short programs fill the end of the launch.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(count, BLOCK)
    block = program % blocks
    if LAST_FIRST:
        block = blocks - 1 - block
    head = (program // blocks) % heads
    return block * BLOCK, head, program // blocks // heads


@triton.jit
@no_type_check
def first_element(example, count, first, heads, head, SIZE: tl.constexpr):
    """Return the index of the element at which row `first` of a head begins."""
    return ((tl.cast(example, tl.int64) * count + first) * heads + head) * SIZE


@triton.jit
@no_type_check
def _part(pointer, stride, count, ROWS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None]
    columns = FIRST + tl.arange(0, WIDTH)[None, :]
    return pointer + (rows * stride + columns), (rows < count) & (columns < SIZE)


@triton.jit
@no_type_check
def _load_part(pointer, stride, count, ROWS, SIZE, FIRST: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    at, inside = _part(pointer, stride, count, ROWS, SIZE, FIRST, WIDTH)
    if WHOLE and FIRST + WIDTH <= SIZE:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
@no_type_check
def load(
    pointer,
    stride,
    count,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    WHOLE: tl.constexpr = False,
):
    """Two tiles of `ROWS` rows, with zeros from row `count` on. `WHOLE`: there are that many rows."""
    main = _load_part(pointer, stride, count, ROWS, SIZE, 0, MAIN, WHOLE)
    # Without a tail there is some tile in its place, which nobody reads.
    return main, _load_part(pointer, stride, count, ROWS, SIZE, MAIN, TAIL, WHOLE) if TAIL else main


@triton.jit
@no_type_check
def store(pointer, main, tail, stride, count, ROWS, SIZE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    at, inside = _part(pointer, stride, count, ROWS, SIZE, 0, MAIN)
    tl.store(at, main.to(pointer.dtype.element_ty), mask=inside)
    if TAIL:
        at, inside = _part(pointer, stride, count, ROWS, SIZE, MAIN, TAIL)
        tl.store(at, tail.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def zeros(ROWS: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    return tl.zeros([ROWS, MAIN], tl.float32), tl.zeros([ROWS, TAIL if TAIL else 16], tl.float32)


@triton.jit
@no_type_check
def inner(a, a_tail, b, b_tail, TAIL: tl.constexpr):
    """`a @ b.T` over the head size."""
    out = tl.dot(a, tl.trans(b), input_precision="ieee")
    if TAIL:
        out = tl.dot(a_tail, tl.trans(b_tail), out, input_precision="ieee")
    return out


@triton.jit
@no_type_check
def outer(weights, b, b_tail, out, out_tail, TAIL: tl.constexpr):
    """`out + weights @ b`, along the head size."""
    weights = weights.to(b.dtype)
    out = tl.dot(weights, b, out, input_precision="ieee")
    if TAIL:
        out_tail = tl.dot(weights, b_tail, out_tail, input_precision="ieee")
    return out, out_tail


@triton.jit
@no_type_check
def softmax_step(
    products, query, key, top, total, queries, keys, scale, options,
    CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Weights relative to the highest logit so far, and what earlier weights have to be multiplied by. `scale` has log2(e).

    Where all products count, the maximum is taken before they are scaled: scaling is then part of the multiplication and
    addition that the exponent needs anyway. So the sign of the scale has to be known.
    """
    if MASKED or SOFT_CAP != 0 or HAS & (BIAS | SLOPES):
        logits, _ = exponents(products, query, key, options, queries, keys, scale, SOFT_CAP, HAS)
        if MASKED:
            seen = is_seen(query, key, options, queries, keys, CAUSAL, WINDOW, HAS)
            logits = tl.where(seen, logits, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))
        # A row that saw nothing has no highest logit; any number will do.
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(logits - safe[:, None])
    else:
        extreme = tl.min(products, 1) if NEGATIVE else tl.max(products, 1)
        highest = tl.maximum(top, extreme * scale)
        safe = highest
        weights = tl.exp2(products * scale - safe[:, None])
    shrink = tl.exp2(top - safe)
    return weights, shrink, highest, total * shrink + tl.sum(weights, 1)


@triton.jit
@no_type_check
def _visit(
    out, out_tail, top, total, q, q_tail, k, v, query, start, stop, queries, keys, stride, scale, options,
    SIZE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, DROPOUT: tl.constexpr, KEEP: tl.constexpr, HAS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    # Without this, the loop may have no step as far as the assembler knows, and the zeros that it would leave are written where
    # products may be under way. The assembler then waits after each of Hopper's products (its message C7515).
    if start < stop:
        for at in range(start, stop, BLOCK_KEYS):
            step, left = tl.cast(at, tl.int64) * stride, filled_of(options) - at
            key = at + tl.arange(0, BLOCK_KEYS)[None, :]
            block, block_tail = load(k + step, stride, left, BLOCK_KEYS, SIZE, MAIN, TAIL, not MASKED)
            products = inner(q, q_tail, block, block_tail, TAIL)
            # fmt: off
            weights, shrink, top, total = softmax_step(
                products, query, key, top, total, queries, keys, scale, options,
                CAUSAL, NEGATIVE, WINDOW, SOFT_CAP, HAS, MASKED)
            # fmt: on
            weights = dropped(weights, query, key, options, queries, keys, DROPOUT, KEEP, HAS)
            out *= shrink[:, None]
            if TAIL:
                out_tail *= shrink[:, None]
            block, block_tail = load(v + step, stride, left, BLOCK_KEYS, SIZE, MAIN, TAIL, not MASKED)
            out, out_tail = outer(weights, block, block_tail, out, out_tail, TAIL)
    return out, out_tail, top, total


@triton.jit
@no_type_check
def _part_of(part, parts, begin, whole, end, stop, BLOCK_KEYS: tl.constexpr):
    """The ranges of `key_range` within one part of the keys between `begin` and `stop`."""
    size = tl.cdiv(tl.cdiv(tl.maximum(stop - begin, 0), parts), BLOCK_KEYS) * BLOCK_KEYS
    least = begin + part * size
    most = tl.minimum(least + size, stop)
    return least, tl.minimum(tl.maximum(whole, least), most), tl.minimum(tl.maximum(end, least), most), most


@triton.jit
@no_type_check
def attention_forward(
    q, k, v, bias, mask, alibi_slopes, query_segments, key_segments, lengths, offset, dropout_keys, kept,
    out, lse, part_out, part_lse,
    batch, queries, keys, heads, kv_heads, kv_batch, scale,
    bias_every, bias_batch, bias_heads, mask_every, mask_batch, mask_heads, slopes_every, slopes_batch,
    query_segments_every, query_segments_batch, key_segments_every, key_segments_batch,
    lengths_every, lengths_batch, offset_every, offset_batch,
    dropout_keys_every, dropout_keys_batch, kept_every, kept_batch, parts,
    SIZE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, DROPOUT: tl.constexpr, KEEP: tl.constexpr, HAS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. Grid: `(cdiv(queries, BLOCK_QUERIES) * heads * batch,)`.

    `PACKED`: one block of the queries of all heads that share a head of keys, and one part of the keys that these see. The
    softmax of a part goes to `part_out` and `part_lse`, for `attention_join`.
    Grid: `(cdiv(queries * heads // kv_heads, BLOCK_QUERIES) * kv_heads * batch, parts)`.
    """
    group = heads // kv_heads
    rows = tl.arange(0, BLOCK_QUERIES)[:, None]
    if PACKED:
        first, kv_head, example = place(queries * group, kv_heads, BLOCK_QUERIES, False)
        # Each row has an address of its own: a query, and a head of the group.
        query, head = (first + rows) // group, kv_head * group + (first + rows) % group
        nearest, furthest = first // group, (first + BLOCK_QUERIES - 1) // group
        first_row, row_stride, left = query, 0, queries * group - first
    else:
        first, head, example = place(queries, heads, BLOCK_QUERIES, CAUSAL)
        kv_head, query = head // group, first + rows
        nearest, furthest = first, first + (BLOCK_QUERIES - 1)
        first_row, row_stride, left = first, heads, queries - first
    # fmt: off
    options = options_of(
        example, head, queries, keys, heads,
        bias, mask, alibi_slopes, query_segments, key_segments, lengths, offset, dropout_keys, kept,
        bias_every, bias_batch, bias_heads, mask_every, mask_batch, mask_heads, slopes_every, slopes_batch,
        query_segments_every, query_segments_batch, key_segments_every, key_segments_batch,
        lengths_every, lengths_batch, offset_every, offset_batch,
        dropout_keys_every, dropout_keys_batch, kept_every, kept_batch, HAS)
    # fmt: on
    at = first_element(example, queries, first_row, heads, head, 1)
    at_kv = first_element(example % kv_batch, keys, 0, kv_heads, kv_head, SIZE)
    q, q_tail = load(q + at * SIZE, row_stride * SIZE, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    scale *= LOG2_E
    sums, sums_tail = zeros(BLOCK_QUERIES, MAIN, TAIL)
    top = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    begin, whole, end, stop = key_range(
        nearest, furthest, start_of(options), filled_of(options), CAUSAL, WINDOW, BLOCK_KEYS
    )
    if HAS & SEGMENTS:
        begin, whole, end, stop = keys_within_segments(
            begin, whole, end, stop, nearest, furthest, queries, options, BLOCK_QUERIES, BLOCK_KEYS
        )
    if PACKED:
        begin, whole, end, stop = _part_of(tl.program_id(1), parts, begin, whole, end, stop, BLOCK_KEYS)
    stride = kv_heads * SIZE
    # fmt: off
    if HAS & MASK:
        end = begin
    else:
        if WINDOW or HAS & SEGMENTS:
            sums, sums_tail, top, total = _visit(
                sums, sums_tail, top, total, q, q_tail, k + at_kv, v + at_kv, query, begin, tl.minimum(whole, stop),
                queries, keys, stride, scale, options, SIZE, MAIN, TAIL, CAUSAL, NEGATIVE,
                WINDOW, SOFT_CAP, DROPOUT, KEEP, HAS, BLOCK_KEYS, True)
        sums, sums_tail, top, total = _visit(
            sums, sums_tail, top, total, q, q_tail, k + at_kv, v + at_kv, query, whole, end,
            queries, keys, stride, scale, options, SIZE, MAIN, TAIL, CAUSAL, NEGATIVE,
            WINDOW, SOFT_CAP, DROPOUT, KEEP, HAS, BLOCK_KEYS, False)
    sums, sums_tail, top, total = _visit(
        sums, sums_tail, top, total, q, q_tail, k + at_kv, v + at_kv, query, end, stop,
        queries, keys, stride, scale, options, SIZE, MAIN, TAIL, CAUSAL, NEGATIVE,
        WINDOW, SOFT_CAP, DROPOUT, KEEP, HAS, BLOCK_KEYS, True)
    # fmt: on
    if PACKED:
        at += first_element(tl.program_id(1), batch, 0, queries, 0, 1) * heads
        out, lse = part_out, part_lse
    nothing = total == 0
    total = tl.where(nothing, 1.0, total)
    logarithm = tl.where(nothing, float("-inf"), top * LOG_2 + tl.log(total))
    tl.store(lse + at + rows * row_stride, logarithm[:, None], mask=rows < left)
    inverse = 1 / total[:, None]
    # fmt: off
    store(out + at * SIZE, sums * inverse, sums_tail * inverse, row_stride * SIZE, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    # fmt: on


@triton.jit
@no_type_check
def attention_join(
    q, k, v, bias, mask, alibi_slopes, query_segments, key_segments, lengths, offset, dropout_keys, kept,
    out, lse, part_out, part_lse,
    batch, queries, keys, heads, kv_heads, kv_batch, scale,
    bias_every, bias_batch, bias_heads, mask_every, mask_batch, mask_heads, slopes_every, slopes_batch,
    query_segments_every, query_segments_batch, key_segments_every, key_segments_batch,
    lengths_every, lengths_batch, offset_every, offset_batch,
    dropout_keys_every, dropout_keys_batch, kept_every, kept_batch, parts,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """The softmax of all keys of one query of one head, of those of the parts. Grid: `(queries * heads * batch,)`."""
    row, rows = tl.cast(tl.program_id(0), tl.int64), tl.num_programs(0)
    columns = tl.arange(0, WIDTH)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([WIDTH], tl.float32)
    for first in range(0, parts, BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        at = part * tl.cast(rows, tl.int64) + row
        logarithms = tl.load(part_lse + at, mask=part < parts, other=float("-inf"))
        inside = (part < parts)[:, None] & (columns < SIZE)[None, :]
        of_parts = tl.load(part_out + (at[:, None] * SIZE + columns[None, :]), mask=inside, other=0.0)
        highest = tl.maximum(top, tl.max(logarithms, 0))
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        weights, shrink = tl.exp(logarithms - safe), tl.exp(top - safe)
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + tl.sum(weights[:, None] * of_parts, 0)
        top = highest
    nothing = total == 0
    total = tl.where(nothing, 1.0, total)
    tl.store(lse + row + tl.arange(0, 1), tl.where(nothing, float("-inf"), top + tl.log(total)))
    tl.store(out + row * SIZE + columns, (sums / total).to(out.dtype.element_ty), mask=columns < SIZE)
