"""The calls that the functions refuse, and what they say."""

from eqxcallback import ops

from ..zeros import bf16, f32, i32


REFUSED = [
    (
        lambda: ops.attention(f32(3, 4), f32(3, 4), f32(3, 4)),
        r"attention: expected q of shape \(\*batch, queries, heads, size\); got q: float32\[3,4\]",
    ),
    (
        lambda: ops.attention(f32(3, 2, 4), bf16(3, 1, 4), f32(3, 1, 4)),
        r"attention: expected q, k, v of one floating",
    ),
    (
        lambda: ops.attention(i32(3, 2, 4), i32(3, 1, 4), i32(3, 1, 4)),
        r"attention: expected q, k, v of one floating",
    ),
    (
        lambda: ops.attention(f32(3, 2, 4), f32(3, 1, 4), f32(2, 1, 4)),
        r"attention: expected k and v of shape \(\*batch, keys, kv_heads, size\); got .*v: float32\[2,1,4\]",
    ),
    (lambda: ops.attention(f32(3, 2, 4), f32(1, 3, 1, 4), f32(1, 3, 1, 4)), r"k and v of shape \(\*batch, keys"),
    (
        lambda: ops.attention(*[f32(3, 2, 4)] * 3, segment_ids=(i32(3),)),  # pyright: ignore[reportArgumentType]
        r"segment_ids of queries and of keys, a tuple, or one for both; got a tuple of 1\.",
    ),
    (
        lambda: ops.attention(f32(5, 3, 2, 4), f32(1, 3, 1, 4), f32(1, 3, 1, 4)),
        r"attention: expected q and k of the same batch axes and head size",
    ),
    (
        lambda: ops.attention(f32(3, 2, 4), f32(3, 1, 5), f32(3, 1, 5)),
        r"q and k of the same batch axes and head size",
    ),
    (
        lambda: ops.attention(f32(3, 3, 4), f32(3, 2, 4), f32(3, 2, 4)),
        r"attention: expected the heads of q, 3, to be a multiple of those of k, 2",
    ),
    (lambda: ops.attention(f32(3, 3, 4), f32(3, 0, 4), f32(3, 0, 4)), r"to be a multiple of those of k, 0"),
    (
        lambda: ops.decode_attention(f32(4), f32(3, 1, 4), f32(3, 1, 4), i32()),
        r"decode_attention: expected q of shape \(\*batch, heads, size\); got q: float32\[4\]",
    ),
    (
        lambda: ops.decode_attention(f32(5, 2, 4), f32(5, 3, 1, 4), f32(5, 3, 1, 4), i32(3)),
        r"decode_attention: expected length to be integers of shape \(\) or \(5,\); got length: int32\[3\]",
    ),
    (lambda: ops.decode_attention(f32(2, 4), f32(3, 1, 4), f32(3, 1, 4), f32()), r"length to be integers"),
    (
        lambda: ops.decode_attention(f32(2, 4), f32(5, 3, 1, 4), f32(5, 3, 1, 4), i32()),
        r"decode_attention: expected k and v",
    ),
]
