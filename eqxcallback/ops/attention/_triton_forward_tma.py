"""The forward kernel of attention whose tiles are copied by the tensor memory accelerator (TMA) of GPUs since Hopper.

Shapes, dtypes, precision and results are those of `_triton_forward.py`. Of the options it has `causal` alone, and query heads may
share a head of keys. Rows of a head are a multiple of 16 bytes, as TMA wants them.

One instruction copies a tile of queries, keys or values. No thread computes addresses, and what lies beyond the last row or
column arrives as zeros. A descriptor says where the rows of a head begin, how many there are, and how large a tile is. Each
program writes descriptors of its own, of 128 bytes, to scratch memory that the launcher has for it.

With `SPECIALIZED` Triton gives the copies to some warps and the products and the softmax to others, on Hopper in groups of 64
queries. A group waits for its copies and for nothing else, so that the softmax of one may run beside the products of the other.

The source of the method is FlashAttention-3, arXiv:2407.08608, without its order in which groups take turns.
"""

# As in `_triton_forward.py`, whose functions these call.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from ._triton_forward import first_element, inner, outer, place, store, zeros
from ._triton_pairs import LOG2_E, LOG_2


@triton.jit
@no_type_check
def descriptors(pointer, count, stride, ROWS: tl.constexpr, SIZE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """Make descriptors for the two tiles of `ROWS` rows of a head, which has `count` rows in all."""
    main = tl.make_tensor_descriptor(pointer, [count, SIZE], [stride, 1], [ROWS, MAIN])
    # Without a tail there is some descriptor in its place, which nobody reads.
    return main, tl.make_tensor_descriptor(pointer, [count, SIZE], [stride, 1], [ROWS, TAIL]) if TAIL else main


@triton.jit
@no_type_check
def copy(main, tail, first, MAIN: tl.constexpr, TAIL: tl.constexpr):
    """The two tiles from row `first` on."""
    block = main.load([first, 0])
    return block, tail.load([first, MAIN]) if TAIL else block


@triton.jit
@no_type_check
def attention_forward_tma(
    q, k, v, bias, mask, alibi_slopes, query_segments, key_segments, lengths, offset, dropout_keys, kept,
    out, lse,
    queries, keys, heads, kv_heads, kv_batch, scale,
    SIZE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. Grid: `(cdiv(queries, BLOCK_QUERIES) * heads * batch,)`.

    `MASKED`: some pairs of a query and a key are not seen. `scale` is not zero then, as it multiplies an infinity.
    """
    first, head, example = place(queries, heads, BLOCK_QUERIES, CAUSAL)
    rows = tl.arange(0, BLOCK_QUERIES)
    at_head = first_element(example, queries, 0, heads, head, 1)
    at_kv = first_element(example % kv_batch, keys, 0, kv_heads, head // (heads // kv_heads), SIZE)
    of_q, of_q_tail = descriptors(q + at_head * SIZE, queries, heads * SIZE, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    of_k, of_k_tail = descriptors(k + at_kv, keys, kv_heads * SIZE, BLOCK_KEYS, SIZE, MAIN, TAIL)
    of_v, of_v_tail = descriptors(v + at_kv, keys, kv_heads * SIZE, BLOCK_KEYS, SIZE, MAIN, TAIL)
    q, q_tail = copy(of_q, of_q_tail, first, MAIN, TAIL)
    scale *= LOG2_E
    sums, sums_tail = zeros(BLOCK_QUERIES, MAIN, TAIL)
    top = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    # The last key that a query sees.
    last = first + rows + (keys - queries) if CAUSAL else tl.full([BLOCK_QUERIES], keys - 1, tl.int32)
    stop = tl.minimum(first + BLOCK_QUERIES + (keys - queries), keys) if CAUSAL else keys
    # One loop for all blocks, so that under `CAUSAL` each pair is asked whether it is seen. With a second loop, for the last
    # blocks, Triton 3.9 ends in an error, and with a branch it gives all warps the same work.
    for at in tl.range(0, stop, BLOCK_KEYS, warp_specialize=SPECIALIZED):
        block, block_tail = copy(of_k, of_k_tail, at, MAIN, TAIL)
        products = inner(q, q_tail, block, block_tail, TAIL)
        if MASKED:
            # Not `at + column <= last`, which would need a sum for each column.
            seen = tl.arange(0, BLOCK_KEYS)[None, :] <= (last - at)[:, None]
            products = tl.where(seen, products, float("inf") if NEGATIVE else float("-inf"))
        # As in `softmax_step`: scaling is part of the multiplication and addition that the exponent needs anyway.
        extreme = tl.min(products, 1) if NEGATIVE else tl.max(products, 1)
        highest = tl.maximum(top, extreme * scale)
        # A row that saw nothing has no highest logit; any number will do.
        safe = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
        weights = tl.exp2(products * scale - safe[:, None])
        shrink = tl.exp2(top - safe)
        top = highest
        total = total * shrink + tl.sum(weights, 1)
        sums *= shrink[:, None]
        if TAIL:
            sums_tail *= shrink[:, None]
        block, block_tail = copy(of_v, of_v_tail, at, MAIN, TAIL)
        sums, sums_tail = outer(weights, block, block_tail, sums, sums_tail, TAIL)
    at_row = at_head + first * tl.cast(heads, tl.int64)
    left = queries - first
    nothing = total == 0
    total = tl.where(nothing, 1.0, total)
    logarithm = tl.where(nothing, float("-inf"), top * LOG_2 + tl.log(total))
    tl.store(lse + at_row + rows * heads, logarithm, mask=rows < left)
    inverse = 1 / total[:, None]
    # fmt: off
    store(
        out + at_row * SIZE, sums * inverse, sums_tail * inverse, heads * SIZE, left, BLOCK_QUERIES, SIZE, MAIN, TAIL)
    # fmt: on
