"""The calls that the functions refuse, and what they say."""

from eqxcallback import ops

from ..zeros import bf16, f32, i32


REFUSED = [
    (
        lambda: ops.rotary_embedding(f32(2, 4), f32(2, 2), f32(2, 2)),
        r"rotary_embedding: expected x of shape \(\*batch, rows, heads, size\), size even; got x: float32\[2,4\]",
    ),
    (lambda: ops.rotary_embedding(f32(2, 1, 3), f32(2, 1), f32(2, 1)), r"size even"),
    (lambda: ops.rotary_embedding(i32(2, 1, 4), f32(2, 2), f32(2, 2)), r"x of one floating dtype"),
    (lambda: ops.rotary_embedding(f32(2, 1, 4), f32(2, 2), bf16(2, 2)), r"cos, sin of one floating dtype"),
    (
        lambda: ops.rotary_embedding(f32(5, 2, 1, 4), f32(2, 3), f32(2, 3)),
        r"cos and sin of one of the shapes \(\(2, 2\), \(5, 2, 2\)\); got cos: float32\[2,3\]",
    ),
    (lambda: ops.rotary_embedding(f32(5, 2, 1, 4), f32(2, 2), f32(5, 2, 2)), r"cos and sin of one of the shapes"),
    (
        lambda: ops.rotary_embedding(f32(5, 2, 1, 4), f32(1, 2, 2), f32(1, 2, 2)),
        r"cos and sin of one of the shapes",
    ),
    (
        lambda: ops.rotary_append(f32(2, 4), f32(2, 2), f32(2, 2), f32(5, 1, 4), f32(5, 1, 4), i32()),
        r"rotary_append: expected qkv of shape \(\*batch, rows, heads \+ 2 \* kv_heads, size\), size even; got qkv: ",
    ),
    *[
        (
            lambda qkv=qkv, k=k, v=v: ops.rotary_append(qkv, f32(2, 2), f32(2, 2), k, v, i32()),
            r"rotary_append: expected k_cache and v_cache of shape \(\*batch, length, kv_heads, size\), where length is at least",
        )
        for qkv, k, v in (
            (f32(2, 3, 4), f32(5, 2, 4), f32(5, 2, 4)),  # fewer heads than two for each of the cache
            (f32(2, 3, 4), f32(1, 1, 4), f32(1, 1, 4)),  # no room
            (f32(2, 3, 4), f32(5, 1, 4), f32(6, 1, 4)),
            (f32(2, 3, 4), f32(5, 1, 6), f32(5, 1, 6)),
            (f32(7, 2, 3, 4), f32(5, 1, 4), f32(5, 1, 4)),
        )
    ],
    (
        lambda: ops.rotary_append(f32(2, 3, 4), f32(2, 2), f32(2, 2), bf16(5, 1, 4), f32(5, 1, 4), i32()),
        r"rotary_append: expected qkv, k_cache, v_cache of one floating dtype",
    ),
    (
        lambda: ops.rotary_append(f32(2, 3, 4), f32(2, 3), f32(2, 3), f32(5, 1, 4), f32(5, 1, 4), i32()),
        r"rotary_append: expected cos and sin of one of the shapes",
    ),
    (
        lambda: ops.rotary_append(f32(2, 3, 4), f32(2, 2), f32(2, 2), f32(5, 1, 4), f32(5, 1, 4), i32(2)),
        r"rotary_append: expected position to be integers of shape \(\)",
    ),
    (lambda: ops.rotary_table(i32(2), 3), r"rotary_table: expected an even head_size; got head_size: 3"),
    (lambda: ops.rotary_table(i32(2), 4.0), r"rotary_table: expected head_size to be an even number; got 4\.0\."),  # pyright: ignore[reportArgumentType]
    (lambda: ops.rotary_table(i32(2), -4), r"rotary_table: expected head_size to be an even number; got -4\."),
    (
        lambda: ops.rotary_table(f32(2), 4),
        r"rotary_table: expected positions to be integers; got positions: float32\[2\]",
    ),
    (lambda: ops.rotary_table(i32(2), 4, dtype="bfloat16"), r"dtype to be float32 or float64; got bfloat16\."),
    (lambda: ops.rotary_table(i32(2), 4, factors=[1.0]), r"rotary_table: expected factors of shape \(head_size / 2,\)"),
]
