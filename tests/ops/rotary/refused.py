"""What the functions refuse, and what they say."""

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
    (lambda: ops.rotary_table(i32(2), 3), r"rotary_table: expected an even head_size; got head_size: 3"),
]
