"""What the functions of `ops` refuse, and what they say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops, reference


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
        (
            lambda: ops.rms_norm(f32(2), eps="a"),  # pyright: ignore[reportArgumentType]
            r"rms_norm: expected eps to be a number; got 'a'\.",
        ),
        (
            lambda: ops.layer_norm(f32(2), eps=None),  # pyright: ignore[reportArgumentType]
            r"layer_norm: expected eps to be a number; got None\.",
        ),
        (
            lambda: ops.add_rms_norm(f32(2), f32(2), eps=1j),  # pyright: ignore[reportArgumentType]
            r"add_rms_norm: expected eps to be a number; got 1j\.",
        ),
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
        (
            lambda: ops.softmax_cross_entropy(f32(3), i32(), label_smoothing="a"),  # pyright: ignore[reportArgumentType]
            r"softmax_cross_entropy: expected label_smoothing from 0 to 1; got 'a'\.",
        ),
        (
            lambda: ops.softmax_cross_entropy(f32(3), i32(), z_loss="1"),  # pyright: ignore[reportArgumentType]
            r"softmax_cross_entropy: expected z_loss to be a number; got '1'\.",
        ),
        (
            lambda: ops.softmax_cross_entropy(f32(3), i32(), ignore_index=1.5),  # pyright: ignore[reportArgumentType]
            r"softmax_cross_entropy: expected ignore_index to be an integer or None; got 1\.5\.",
        ),
        (
            lambda: ops.softmax_cross_entropy(f32(3), i32(), ignore_index=True),
            r"softmax_cross_entropy: expected ignore_index to be an integer or None; got True\.",
        ),
        (
            lambda: ops.linear_cross_entropy(f32(3), f32(5, 3), i32(), ignore_index="1"),  # pyright: ignore[reportArgumentType]
            r"linear_cross_entropy: expected ignore_index to be an integer or None; got '1'\.",
        ),
        (
            lambda: ops.quantize(f32(32) + np.float32(1e7), encoding="Q8_0"),
            r"quantize: expected weight of magnitudes up to 8319008 \(Q8_0\), .*; got 10000000\.0\. Use quantize_int8",
        ),
        (
            lambda: ops.quantize(f32(32) - np.float32(1e5), encoding="Q4_1"),
            r"quantize: expected weight of magnitudes up to 65504 \(Q4_1\), as scales are f16; got 100000\.0\.",
        ),
        (lambda: ops.quantize(f16(32) + np.float16(np.inf), encoding="Q8_0"), r"magnitudes up to 8319008 .*; got inf"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_ignored_index_of_numpy():
    ignored: Any = np.int64(2)
    logits, labels = f32(2, 3), np.array([1, 2], np.int32)
    np.testing.assert_array_equal(
        ops.softmax_cross_entropy(logits, labels, ignore_index=ignored),
        ops.softmax_cross_entropy(logits, labels, ignore_index=2),
    )


@pytest.mark.parametrize(("encoding", "largest"), [("Q8_0", 127 * 65504), ("Q4_1", 65504)])
def test_the_largest_weights_that_blocks_can_be_made_of(encoding, largest):
    """They are what they were. Of larger ones, nobody knows while a program is traced, but of its constants."""
    weight = jnp.full(32, -largest, jnp.float32)
    blocks = ops.quantize(weight, encoding=encoding)
    np.testing.assert_array_equal(ops.dequantize(blocks, encoding=encoding), weight)
    nothing, larger = jnp.full(32, jnp.nan), 2 * weight
    assert np.isnan(ops.dequantize(ops.quantize(nothing, encoding=encoding), encoding=encoding)).all()
    assert ops.quantize(f32(0, 32), encoding=encoding).size == 0
    traced = jax.jit(lambda weight: ops.quantize(weight, encoding=encoding))
    np.testing.assert_array_equal(traced(larger), reference.quantize(larger, encoding=encoding))
    with pytest.raises(ValueError, match="quantize: expected weight of magnitudes up to"):
        jax.jit(lambda: ops.quantize(larger, encoding=encoding))()
    with pytest.raises(ValueError, match="quantize: expected weight of magnitudes up to"):
        ops.quantize(jnp.concatenate([larger, nothing]), encoding=encoding)
