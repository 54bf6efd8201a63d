"""What the functions of `ops` refuse, and what they say."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops


def f32(*shape) -> Any:
    return np.zeros(shape, np.float32)


def bf16(*shape) -> Any:
    return jnp.zeros(shape, jnp.bfloat16)


def i32(*shape) -> Any:
    return np.zeros(shape, np.int32)


def f16(*shape) -> Any:
    return np.zeros(shape, np.float16)


def c64(*shape) -> Any:
    return np.zeros(shape, np.complex64)


def u8(*shape) -> Any:
    return np.zeros(shape, np.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.rms_norm(i32(3)), r"rms_norm: expected x of one floating dtype; got x: int32\[3\]"),
        (lambda: ops.rms_norm(c64(3)), r"x of one floating dtype; got x: complex64\[3\]"),
        (lambda: ops.rms_norm(f32()), r"rms_norm: expected x with at least one axis; got x: float32\[\]"),
        (
            lambda: ops.rms_norm(f32(2, 3), f32(2)),
            r"rms_norm: expected weight of the shape of the last axis of x; got weight: float32\[2\], x: float32\[2,3\]",
        ),
        (lambda: ops.rms_norm(f32(2, 3), f32(1, 3)), r"weight of the shape of the last axis"),
        (lambda: ops.rms_norm(f32(2, 3), f32()), r"weight of the shape of the last axis"),
        (lambda: ops.swiglu(f32()), r"swiglu: expected gate with at least one axis"),
        (
            lambda: ops.swiglu(f32(2, 3)),
            r"swiglu: expected an even last axis of gate, which holds both halves; got gate",
        ),
        (lambda: ops.swiglu(i32(4)), r"swiglu: expected gate of one floating dtype"),
        (lambda: ops.swiglu(f32(2, 3), f32(3)), r"swiglu: expected gate and up of one shape; got .*up: float32\[3\]"),
        (
            lambda: ops.swiglu(f32(3), bf16(3)),
            r"swiglu: expected gate, up of one floating dtype; got .*up: bfloat16\[3\]",
        ),
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
        (
            lambda: ops.cache_append(f32(), f32(), i32()),
            r"cache_append: expected cache to have a length after its 0 batch axes; got cache: float32\[\]",
        ),
        (lambda: ops.cache_append(f32(3), f32(1), i32(), batch_dims=1), r"a length after its 1 batch axes"),
        (lambda: ops.cache_append(f32(3), f32(1), i32(), batch_dims=-1), r"a length after its -1 batch axes"),
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
        (
            lambda: ops.quantized_linear(f32(32), u8(3, 20), encoding="Q4_0"),  # pyright: ignore[reportArgumentType]
            r"quantized_linear: expected encoding to be one of Q4_1, Q8_0; got 'Q4_0'",
        ),
        (
            lambda: ops.quantized_linear(f32(32), u8(3, 21), encoding="Q4_1"),
            r"expected uint8 blocks with a multiple of 20 bytes in each row \(Q4_1\); got blocks: uint8\[3,21\]",
        ),
        (lambda: ops.quantized_linear(f32(32), i32(3, 34), encoding="Q8_0"), r"uint8 blocks .* of 34 bytes .*\(Q8_0\)"),
        (lambda: ops.quantized_linear(f32(32), u8(), encoding="Q8_0"), r"uint8 blocks .* of 34 bytes"),
        (
            lambda: ops.quantized_linear(i32(32), u8(3, 34), encoding="Q8_0"),
            r"quantized_linear: expected x of one floating",
        ),
        (
            lambda: ops.quantized_linear(f32(32).astype(jnp.float8_e5m2), u8(3, 34), encoding="Q8_0"),
            r"quantized_linear: expected x of float32, bfloat16 or float16; got x: float8_e5m2\[32\]",
        ),
        (
            lambda: ops.quantized_linear(f32(33), u8(3, 34), encoding="Q8_0"),
            r"blocks of shape \(out_features, bytes\) for the last axis of x, 32 features; got x: float32\[33\]",
        ),
        (lambda: ops.quantized_linear(f32(32), u8(34), encoding="Q8_0"), r"blocks of shape \(out_features, bytes\)"),
        (
            lambda: ops.quantized_linear(f32(32), u8(2, 3, 34), encoding="Q8_0"),
            r"blocks of shape \(out_features, bytes\)",
        ),
        (lambda: ops.quantized_linear(f32(), u8(3, 34), encoding="Q8_0"), r"blocks of shape \(out_features, bytes\)"),
        (
            lambda: ops.dequantize(u8(3, 33), encoding="Q8_0"),
            r"dequantize: expected uint8 blocks with a multiple of 34 bytes in each row \(Q8_0\); got blocks: uint8\[3,33\]",
        ),
        (
            lambda: ops.dequantize(u8(34), encoding="F16"),  # pyright: ignore[reportArgumentType]
            r"dequantize: expected encoding to be one of Q4_1, Q8_0; got 'F16'",
        ),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
