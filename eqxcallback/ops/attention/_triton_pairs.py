"""The effect of attention's options on a query and a key, for all kernels in Triton.

Which options there are is a constant, `HAS`, with a bit for each of `OPTIONAL`, and those of `OF_KEYS`; a kernel without them
has no instruction of theirs. Where the parameters of a kernel say `None`, `options_of` gives some number, which nobody reads.

Indices of queries and of keys are tiles that broadcast to one of pairs, in either order. Exponents are of two.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from ._operands import OF_KEYS, OPTIONAL
from ._reference_dropout import ROTATIONS


LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)

BIAS, MASK, SLOPES, SEGMENTS, KEY_SEGMENTS, LENGTHS, OFFSET, DROPOUT_KEYS, KEPT = (
    tl.constexpr(1 << i) for i in range(len(OPTIONAL))
)
# Besides: queries share the one row of the bias, or of the mask.
BIAS_OF_KEYS = tl.constexpr(OF_KEYS["bias"])
MASK_OF_KEYS = tl.constexpr(OF_KEYS["mask"])
# Segments that are compared at a time, to find a range.
_SCANNED = tl.constexpr(1024)
_LARGEST = tl.constexpr(2**31 - 1)

_EVEN = tl.constexpr(ROTATIONS[0])
_ODD = tl.constexpr(ROTATIONS[1])


@triton.jit
@no_type_check
def _one_of(example, every, count):
    """The example of an operand that lacks some of the batch axes."""
    return tl.cast(example // every % count, tl.int64)


@triton.jit
@no_type_check
def options_of(
    example, head, queries, keys, heads,
    bias, mask, alibi_slopes, query_segments, key_segments, lengths, offset, dropout_keys, kept,
    bias_every, bias_batch, bias_heads, mask_every, mask_batch, mask_heads, slopes_every, slopes_batch,
    query_segments_every, query_segments_batch, key_segments_every, key_segments_batch,
    lengths_every, lengths_batch, offset_every, offset_batch,
    dropout_keys_every, dropout_keys_batch, kept_every, kept_batch,
    HAS: tl.constexpr,
):  # fmt: skip
    """A tuple of what one head of one example has, which the functions below take apart."""
    pairs = tl.cast(queries, tl.int64) * keys
    # fmt: off
    bias_of = (
        bias + (_one_of(example, bias_every, bias_batch) * bias_heads + head % bias_heads)
        * (keys if HAS & BIAS_OF_KEYS else pairs)
        if HAS & BIAS else example
    )
    mask_of = (
        mask + (_one_of(example, mask_every, mask_batch) * mask_heads + head % mask_heads)
        * (keys if HAS & MASK_OF_KEYS else pairs)
        if HAS & MASK else example
    )
    slope = (
        tl.load(alibi_slopes + _one_of(example, slopes_every, slopes_batch) * heads + head) * LOG2_E
        if HAS & SLOPES else example
    )
    ids = (
        query_segments + _one_of(example, query_segments_every, query_segments_batch) * queries
        if HAS & SEGMENTS else example
    )
    key_ids = (
        key_segments + _one_of(example, key_segments_every, key_segments_batch) * keys
        if HAS & SEGMENTS else example
    )
    filled = (
        tl.minimum(tl.maximum(tl.load(lengths + _one_of(example, lengths_every, lengths_batch)), 0), keys)
        if HAS & LENGTHS else keys
    )
    start = tl.load(offset + _one_of(example, offset_every, offset_batch)) if HAS & OFFSET else keys - queries
    stays = (
        dropout_keys + (_one_of(example, dropout_keys_every, dropout_keys_batch) * heads + head) * 2
        if HAS & DROPOUT_KEYS else
        kept + (_one_of(example, kept_every, kept_batch) * heads + head) * pairs
        if HAS & KEPT else example
    )
    # fmt: on
    return bias_of, mask_of, slope, ids, key_ids, filled, start, stays


@triton.jit
@no_type_check
def filled_of(options):
    """Return the number of keys."""
    return options[5]


@triton.jit
@no_type_check
def start_of(options):
    """The position of the first query."""
    return options[6]


@triton.jit
@no_type_check
def _between(x, least, most):
    return tl.cast(tl.minimum(tl.maximum(x, least), most), tl.int32)


@triton.jit
@no_type_check
def key_range(
    nearest, furthest, start, filled, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr
):  # fmt: skip
    """`begin, whole, end, stop`: queries `nearest` to `furthest` see keys from `begin` to `stop`, and each of them those from
    `whole` to `end`.

    Rounded to blocks of keys, but for `stop`.
    """
    begin = 0
    whole = 0
    end = filled
    stop = filled
    # 64 bits: an offset and a window may be 2^30 each.
    nearest += tl.cast(start, tl.int64)
    furthest += tl.cast(start, tl.int64)
    if CAUSAL:
        end = _between(nearest + 1, 0, filled)
        stop = _between(furthest + 1, 0, filled)
    if WINDOW:
        begin = _between(nearest - (WINDOW - 1), 0, filled) // BLOCK_KEYS * BLOCK_KEYS
        whole = tl.cdiv(_between(furthest - (WINDOW - 1), 0, filled), BLOCK_KEYS) * BLOCK_KEYS
        if not CAUSAL:
            end = _between(nearest + WINDOW, 0, filled)
            stop = _between(furthest + WINDOW, 0, filled)
    end = end // BLOCK_KEYS * BLOCK_KEYS
    if WINDOW:
        end = tl.maximum(end, whole)
    return begin, whole, end, stop


@triton.jit
@no_type_check
def query_range(
    first, start, filled, queries,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """`begin, whole, end, stop`: a block of keys is seen by queries from `begin` to `stop`, and wholly from `whole` to `end`.

    Rounded to blocks of queries, but for `stop`. Queries from `end` on may see a part of the block, if there is a window.
    """
    begin = 0
    whole = 0
    end = queries
    stop = queries
    nearest = first - tl.cast(start, tl.int64)
    furthest = nearest + (BLOCK_KEYS - 1)
    if CAUSAL:
        begin = _between(nearest, 0, queries) // BLOCK_QUERIES * BLOCK_QUERIES
        whole = tl.cdiv(_between(furthest, 0, queries), BLOCK_QUERIES) * BLOCK_QUERIES
    if WINDOW:
        if not CAUSAL:
            begin = _between(nearest - (WINDOW - 1), 0, queries) // BLOCK_QUERIES * BLOCK_QUERIES
            whole = tl.cdiv(_between(furthest - (WINDOW - 1), 0, queries), BLOCK_QUERIES) * BLOCK_QUERIES
        end = _between(nearest + WINDOW, 0, queries) // BLOCK_QUERIES * BLOCK_QUERIES
        stop = _between(furthest + WINDOW, 0, queries)
    if HAS & LENGTHS:
        # In a block that is not full, each pair is asked.
        whole = tl.where(first + BLOCK_KEYS > filled, queries, whole)
        stop = tl.where(first >= filled, 0, stop)
    if WINDOW or HAS & LENGTHS:
        end = tl.maximum(end, whole)
    return begin, whole, end, stop


@triton.jit
@no_type_check
def _within_segments(
    begin, whole, end, stop, rows, first, last, others, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The part of a range that rows `first` to `last` of a block may share a segment with: one between the least and the highest
    of theirs.

    `rows` and `others` are the segments of all rows, and of what the range is of. What lies between `whole` and `end` is seen by
    all of the rows: nothing, unless these have one segment, and all that is left of the range has it too.
    """
    index = first + tl.arange(0, ROWS)
    own = tl.load(rows + index, mask=index <= last, other=0)
    least = tl.min(tl.where(index <= last, own, _LARGEST), 0)
    most = tl.max(tl.where(index <= last, own, -_LARGEST - 1), 0)
    nearest = stop
    behind = begin
    count = 0
    for at in range(begin, stop, _SCANNED):
        place = at + tl.arange(0, _SCANNED)
        other = tl.load(others + place, mask=place < stop, other=0)
        inside = (place < stop) & (other >= least) & (other <= most)
        nearest = tl.minimum(nearest, tl.min(tl.where(inside, place, stop), 0))
        behind = tl.maximum(behind, tl.max(tl.where(inside, place + 1, begin), 0))
        count += tl.sum(inside.to(tl.int32), 0)
    begin = tl.maximum(begin, nearest // BLOCK * BLOCK)
    stop = tl.minimum(stop, behind)
    same = (least == most) & (count == behind - nearest)
    whole = tl.where(same, tl.maximum(whole, tl.cdiv(nearest, BLOCK) * BLOCK), begin)
    end = tl.where(same, tl.maximum(tl.minimum(end, behind // BLOCK * BLOCK), whole), begin)
    return begin, whole, end, stop


@triton.jit
@no_type_check
def keys_within_segments(
    begin, whole, end, stop, nearest, furthest, queries, options, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr
):  # fmt: skip
    """Return what segments leave of a `key_range`."""
    last = tl.minimum(furthest, queries - 1)
    # fmt: off
    return _within_segments(
        begin, whole, end, stop, options[3], nearest, last, options[4], BLOCK_QUERIES, BLOCK_KEYS)
    # fmt: on


@triton.jit
@no_type_check
def queries_within_segments(
    begin, whole, end, stop, first, keys, options, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr
):  # fmt: skip
    """Return what segments leave of a `query_range`."""
    last = tl.minimum(first + (BLOCK_KEYS - 1), keys - 1)
    return _within_segments(begin, whole, end, stop, options[4], first, last, options[3], BLOCK_KEYS, BLOCK_QUERIES)


@triton.jit
@no_type_check
def is_seen(query, key, options, queries, keys, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS: tl.constexpr):
    """Queries past the end may see anything; keys past the end are not seen."""
    start = start_of(options)
    if CAUSAL:
        seen = key <= query + start
        # Otherwise the last query is at the last key.
        if HAS & (LENGTHS | OFFSET):
            seen = seen & (key < filled_of(options))
    else:
        seen = key < filled_of(options)
    if WINDOW:
        away = query + start - key
        seen = seen & (away < WINDOW)
        if not CAUSAL:
            seen = seen & (away > -WINDOW)
    if HAS & MASK_OF_KEYS:
        seen = seen & (tl.load(options[1] + key, mask=key < keys, other=0) != 0)
    elif HAS & MASK:
        inside = (query < queries) & (key < keys)
        seen = seen & (tl.load(options[1] + (tl.cast(query, tl.int64) * keys + key), mask=inside, other=0) != 0)
    if HAS & SEGMENTS:
        ids = tl.load(options[3] + query, mask=query < queries, other=0)
        seen = seen & (ids == tl.load(options[4] + key, mask=key < keys, other=0))
    return seen


@triton.jit
@no_type_check
def tanh(x):
    size = tl.abs(x)
    square = x * x
    # A series where the quotient would lose digits.
    small = size * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    power = tl.exp2(size * (-2 * LOG2_E))
    near = tl.where(size < 0.25, small, (1 - power) / (1 + power))
    return tl.where(x < 0, -near, near)


@triton.jit
@no_type_check
def exponents(products, query, key, options, queries, keys, scale, SOFT_CAP: tl.constexpr, HAS: tl.constexpr):
    """The logits times log2(e), as `scale` has it; and their hyperbolic tangents, if they are capped."""
    logits = products * scale
    tangents = logits
    if SOFT_CAP != 0:
        tangents = tanh(logits * (LOG_2 / SOFT_CAP))
        logits = tangents * (SOFT_CAP * LOG2_E)
    if HAS & BIAS_OF_KEYS:
        logits += tl.load(options[0] + key, mask=key < keys, other=0.0).to(tl.float32) * LOG2_E
    elif HAS & BIAS:
        inside = (query < queries) & (key < keys)
        bias = tl.load(options[0] + (tl.cast(query, tl.int64) * keys + key), mask=inside, other=0.0)
        logits += bias.to(tl.float32) * LOG2_E
    if HAS & SLOPES:
        logits -= options[2] * tl.abs(query + start_of(options) - key).to(tl.float32)
    return logits, tangents


@triton.jit
@no_type_check
def _rotated(x, BITS: tl.constexpr):
    return (x << BITS) | (x >> (32 - BITS))


@triton.jit
@no_type_check
def _threefry(key0, key1, x0, x1):
    key2 = key0 ^ key1 ^ 0x1BD11BDA
    x0 += key0
    x1 += key1
    for group in tl.static_range(5):
        for i in tl.static_range(4):
            x0 += x1
            x1 = _rotated(x1, _EVEN[i] if group % 2 == 0 else _ODD[i]) ^ x0
        x0 += key1 if group % 3 == 0 else key2 if group % 3 == 1 else key0
        x1 += key2 if group % 3 == 0 else key0 if group % 3 == 1 else key1
        x1 += group + 1
    return x0, x1


@triton.jit
@no_type_check
def dropped(weights, query, key, options, queries, keys, DROPOUT: tl.constexpr, KEEP: tl.constexpr, HAS: tl.constexpr):
    """Weights. With dropout some are kept, those that `jax.random.bernoulli` keeps: `KEEP` of 2^23 of its numbers."""
    if HAS & DROPOUT_KEYS:
        index = tl.cast(query, tl.int64) * keys + key
        high, low = (index >> 32).to(tl.uint32), index.to(tl.uint32)
        left, right = _threefry(tl.load(options[7]), tl.load(options[7] + 1), high, low)
        stays = ((left ^ right) >> 9) < KEEP
        weights = tl.where(stays, weights * (1 / (1 - DROPOUT)), 0.0)
    elif HAS & KEPT:
        inside = (query < queries) & (key < keys)
        stays = tl.load(options[7] + (tl.cast(query, tl.int64) * keys + key), mask=inside, other=0) != 0
        weights = tl.where(stays, weights * (1 / (1 - DROPOUT)), 0.0)
    return weights
