"""The calls that the functions refuse, and what they say."""

from eqxcallback import ops

from ..zeros import bf16, f32, i32


REFUSED = [
    (
        lambda: ops.cache_append(f32(), f32(), i32()),
        r"cache_append: expected cache to have a length after its 0 batch axes; got cache: float32\[\]",
    ),
    (lambda: ops.cache_append(f32(3), f32(1), i32(), batch_dims=1), r"a length after its 1 batch axes"),
    (
        lambda: ops.cache_append(f32(3), f32(1), i32(), batch_dims=-1),
        r"batch_dims to be an integer of at least 0; got -1\.",
    ),
    (lambda: ops.cache_append(f32(3), f32(1), i32(), batch_dims=1.0), r"batch_dims to be an integer .*; got 1\.0\."),  # pyright: ignore[reportArgumentType]
    (
        lambda: ops.cache_append(f32(3, 2), f32(4, 2), i32()),
        r"cache_append: expected rows of the dtype and shape of cache, and not more of them .* rows: float32\[4,2\]",
    ),
    (lambda: ops.cache_append(f32(3, 2), f32(1, 3), i32()), r"rows of the dtype and shape of cache"),
    (lambda: ops.cache_append(f32(3, 2), f32(2), i32()), r"rows of the dtype and shape of cache"),
    (lambda: ops.cache_append(f32(3, 2), bf16(1, 2), i32()), r"rows of the dtype and shape of cache"),
    (
        lambda: ops.cache_append(f32(2, 3, 1), f32(1, 3, 1), i32(), batch_dims=1),
        r"rows of the dtype and shape of cache",
    ),
    (
        lambda: ops.cache_append(f32(5, 3, 2), f32(5, 1, 2), i32(2), batch_dims=1),
        r"cache_append: expected position to be integers of shape \(\) or \(5,\); got position: int32\[2\]",
    ),
    (lambda: ops.cache_append(f32(3), f32(1), f32()), r"position to be integers"),
]
