"""The calls that the functions refuse, and what they say."""

import jax.numpy as jnp
import numpy as np

from eqxcallback import ops

from ..zeros import f16, f32, i32, u8


F32, F16, INT = jnp.ones((2, 4)), jnp.ones((2, 4), jnp.float16), jnp.ones((2, 4), jnp.int32)

REFUSED = [
    (
        lambda: ops.quantized_linear(f32(32), u8(3, 20), encoding="Q2_K"),  # pyright: ignore[reportArgumentType]
        r"quantized_linear: expected encoding to be one of Q4_0, Q4_1, .*; got 'Q2_K'",
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
        lambda: ops.quantized_linear_swiglu(f32(32), u8(3, 34), encoding="Q8_0"),
        r"quantized_linear_swiglu: expected an even number of rows of blocks, half of them of the gate; got blocks: .*\[3,34\]",
    ),
    (
        lambda: ops.quantized_linear_swiglu(f32(33), u8(4, 34), encoding="Q8_0"),
        r"quantized_linear_swiglu: expected blocks of shape \(out_features, bytes\) for the last axis of x, 32 features",
    ),
    (
        lambda: ops.dequantize(u8(3, 33), encoding="Q8_0"),
        r"dequantize: expected uint8 blocks with a multiple of 34 bytes in each row \(Q8_0\); got blocks: uint8\[3,33\]",
    ),
    (
        lambda: ops.dequantize(u8(34), encoding="F16"),  # pyright: ignore[reportArgumentType]
        r"dequantize: expected encoding to be one of Q4_0, .*, Q4_1_R16, Q8_0_R16; got 'F16'",
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
    (lambda: ops.linear(INT, F32), r"linear: expected x, weight of one floating dtype; got x: int32\[2,4\]"),
    (lambda: ops.linear(F16, F32), r"linear: expected x, weight of one floating dtype"),
    (lambda: ops.linear(F32, F32.T), r"linear: expected weight of shape \(out_features, in_features\) for the last"),
    (lambda: ops.linear(F32[0, 0], F32), r"linear: expected weight of shape"),
    (lambda: ops.linear(F32, F32, F32[0]), r"linear: expected bias of shape \(out_features,\); got bias: float32\[4\]"),
    (lambda: ops.linear(F32, F32, INT[:, 0]), r"linear: expected bias of one floating dtype"),
    (lambda: ops.embedding(F32, F32), r"embedding: expected index to be integers of shape \(\) or \(2, 4\)"),
    (
        lambda: ops.embedding(INT, F32[0]),
        r"embedding: expected weight of shape \(rows, size\); got weight: float32\[4\]",
    ),
]
