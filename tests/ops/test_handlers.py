"""The handlers in C++ trust nobody: called by hand, with what the functions of `ops` would never pass."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eqxcallback import _ext, xla


BF16 = ml_dtypes.bfloat16
EPS = {"eps": np.float64(1e-5)}
SCALE = {"scale": np.float64(1)}
ATTENTION = {"causal": np.bool_(True), **SCALE}
MASKED = {
    **ATTENTION,
    "window": np.int64(2),
    "soft_cap": np.float64(0),
    "dropout": np.float64(0.5),
    "operands": "bias,alibi_slopes,dropout_keys",
}
DECODE = {**SCALE, "window": np.int64(0), "soft_cap": np.float64(2)}
ROWS = {"row_rank": np.int64(1)}
Q8 = {"encoding": "Q8_0"}
GROUPS = {**EPS, "groups": np.int64(2)}
ASKED = {"asked": np.arange(3)}
APPROXIMATE = {"approximate": np.bool_(True)}


@pytest.fixture(scope="module", autouse=True)
def registered():
    for name, handler in _ext.cpu_ops().items():
        xla.register_handler(f"eqxcallback_{name}", handler, "cpu")


def a(*shape, dtype: Any = np.float32):
    return np.zeros(shape, dtype)


def i32(*shape):
    return a(*shape, dtype=np.int32)


def u8(*shape):
    return a(*shape, dtype=np.uint8)


def i8(*shape):
    return a(*shape, dtype=np.int8)


def call(op, args, result, attributes, aliases=None):
    results = result if isinstance(result, list) else [result]
    struct = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    f = jax.ffi.ffi_call(f"eqxcallback_{op}", struct, input_output_aliases=aliases, has_side_effect=True)
    return jax.block_until_ready(jax.jit(lambda *args: f(*args, **attributes))(*args))


QKV = [a(2, 3, 4, 5), a(7, 2, 5), a(7, 2, 5)]
MORE = [a(1, 4, 3, 7), a(1, 4), a(2, 4, 2, dtype=np.uint32)]
GOOD = {
    "rms_norm": ([a(2, 3), a(3)], a(2, 3), EPS),
    "rms_norm_backward": ([a(2, 3), a(3), a(2, 3), a(2, 3)], [a(2, 3), a(3)], EPS),
    "layer_norm": ([a(2, 3), a(3), a(3)], a(2, 3), EPS),
    "layer_norm_backward": ([a(2, 3), a(3), a(3), a(2, 3), a(2, 3)], [a(2, 3), a(3), a(3)], EPS),
    "layer_norm_bias": ([a(2, 3), a(3)], a(2, 3), EPS),
    "layer_norm_bias_backward": ([a(2, 3), a(3), a(2, 3), a(2, 3)], [a(2, 3), a(3)], EPS),
    "group_norm": ([a(2, 4, 3), a(4), a(4)], a(2, 4, 3), GROUPS),
    "group_norm_bias": ([a(2, 4, 3), a(4)], a(2, 4, 3), GROUPS),
    "add_rms_norm": ([a(2, 3), a(2, 3), a(3)], [a(2, 3), a(2, 3)], EPS),
    "rotary_embedding": ([a(2, 3, 2, 4), a(3, 2), a(3, 2)], a(2, 3, 2, 4), {}),
    "rotary_embedding_backward": (
        [a(2, 3, 2, 4), a(3, 2), a(3, 2), a(2, 3, 2, 4), a(2, 3, 2, 4)],
        [a(2, 3, 2, 4), a(3, 2), a(3, 2)],
        ASKED,
    ),
    "swiglu": ([a(2, 4), a(2, 4)], a(2, 4), {}),
    "swiglu_backward": ([a(2, 4), a(2, 4), a(2, 4), a(2, 4)], [a(2, 4), a(2, 4)], {}),
    "geglu": ([a(2, 4), a(2, 4)], a(2, 4), APPROXIMATE),
    "geglu_backward": ([a(2, 4), a(2, 4), a(2, 4), a(2, 4)], [a(2, 4), a(2, 4)], APPROXIMATE),
    "softmax_cross_entropy": ([a(2, 1), i32(2)], a(2), {}),
    "softmax_cross_entropy_backward": ([a(2, 3), i32(2), a(2), a(2)], a(2, 3), {}),
    "lstm_gates": ([a(2, 12), a(2, 3)], [a(2, 3), a(2, 3)], {}),
    "gru_gates": ([a(2, 9), a(2, 9), a(2, 3), a(3)], a(2, 3), {}),
    "linear": ([a(2, 5), a(3, 5), a(3)], a(2, 3), {}),
    "int8_linear": ([a(2, 5), i8(3, 5), a(3)], a(2, 3), {}),
    "rounded_int8_linear": ([a(2, 5), i8(3, 5), a(3)], a(2, 3), {}),
    "attention": ([a(2, 3, 4, 5), a(7, 2, 5), a(7, 2, 5)], a(2, 3, 4, 5), ATTENTION),
    "attention_backward": (
        [a(2, 3, 4, 5), a(7, 2, 5), a(7, 2, 5), a(2, 3, 4, 5), a(2, 3, 4, 5)],
        [a(2, 3, 4, 5), a(7, 2, 5), a(7, 2, 5)],
        ATTENTION,
    ),
    "masked_attention": ([*QKV, *MORE], QKV[0], MASKED),
    "masked_attention_backward": ([*QKV, *MORE, QKV[0], QKV[0]], [*QKV, *MORE[:2]], MASKED),
    "decode_attention": ([a(2, 4, 5), a(2, 7, 2, 5), a(2, 7, 2, 5), i32()], a(2, 4, 5), SCALE),
    "masked_decode_attention": ([a(2, 4, 5), a(2, 7, 2, 5), a(2, 7, 2, 5), i32(), a(4)], a(2, 4, 5), DECODE),
    "int8_decode_attention": (
        [a(2, 4, 5), i8(2, 7, 2, 5), i8(2, 7, 2, 5), a(2, 7, 2), a(2, 7, 2), i32(), a(4)],
        a(2, 4, 5),
        DECODE,
    ),
    "cache_append": ([a(2, 7, 3), a(2, 1, 3), i32()], a(2, 7, 3), ROWS),
    "quantized_linear": ([a(2, 32), u8(3, 34)], a(2, 3), Q8),
    "rounded_quantized_linear": ([a(2, 32), u8(3, 34)], a(2, 3), Q8),
}


@pytest.mark.parametrize("op", GOOD)
def test_accepted(op):
    args, result, attributes = GOOD[op]
    found = call(op, args, result, attributes, aliases={0: 0} if op == "cache_append" else None)
    for out, want in zip(found, result if isinstance(result, list) else [result], strict=True):
        np.testing.assert_array_equal(out, want)


def test_every_handler_is_here():
    assert set(_ext.cpu_ops()) == set(GOOD)


ROTARY = r"rotary_embedding\[native\]: expected cos and sin of shape"
HEADS = r"expected a number of query heads that is a multiple of the key/value heads; got"
WRONG = [
    ("rms_norm", [a(2, 3)], a(2, 4), EPS, r"rms_norm\[native\]: expected a result of the type of x\."),
    ("rms_norm", [a(2, 3)], a(2, 3, dtype=BF16), EPS, r"expected a result of the type of x"),
    ("rms_norm", [a()], a(), EPS, r"rms_norm\[native\]: expected x with at least 1 axes; got the shape \(\)"),
    ("rms_norm", [i32(3)], i32(3), EPS, r"rms_norm\[native\]: expected arrays of float32, bfloat16 or float16"),
    ("rms_norm", [a(2, 3), a(4)], a(2, 3), EPS, r"a weight of the shape of the last axis of x, \(3,\); got \(4\)"),
    ("rms_norm", [a(2, 3), a(2, 3)], a(2, 3), EPS, r"a weight of the shape of the last axis"),
    ("rms_norm", [a(2, 3), a(3, dtype=BF16)], a(2, 3), EPS, r"rms_norm\[native\]: expected a weight of float32"),
    ("rotary_embedding", [a(2, 4), a(2, 2), a(2, 2)], a(2, 4), {}, r"x with at least 3 axes; got the shape \(2, 4\)"),
    ("rotary_embedding", [a(3, 2, 4), a(2), a(2)], a(3, 2, 4), {}, r"cos with at least 2 axes; got the shape \(2\)"),
    ("rotary_embedding", [a(3, 2, 4), a(3, 2), a(3, 2)], a(3, 2, 5), {}, r"a result of the type of x"),
    ("rotary_embedding", [a(3, 2, 4), a(3, 2, dtype=BF16), a(3, 2)], a(3, 2, 4), {}, r"cos of float32"),
    ("rotary_embedding", [a(3, 2, 4), a(3, 2), i32(3, 2)], a(3, 2, 4), {}, r"sin of float32"),
    ("rotary_embedding", [a(3, 2, 4), a(2, 2), a(2, 2)], a(3, 2, 4), {}, ROTARY),
    ("rotary_embedding", [a(3, 2, 5), a(3, 2), a(3, 2)], a(3, 2, 5), {}, ROTARY),
    ("rotary_embedding", [a(3, 2, 4), a(3, 2), a(3, 1)], a(3, 2, 4), {}, ROTARY),
    ("rotary_embedding", [a(2, 3, 2, 4), a(5, 3, 2), a(5, 3, 2)], a(2, 3, 2, 4), {}, ROTARY),
    ("rotary_embedding", [a(3, 2, 4), a(2, 3, 2), a(2, 3, 2)], a(3, 2, 4), {}, ROTARY),
    ("rotary_embedding", [i32(3, 2, 4), a(3, 2), a(3, 2)], i32(3, 2, 4), {}, r"arrays of float32, bfloat16 or float16"),
    ("layer_norm", [a(2, 3)], a(2, 4), EPS, r"a result of the type of x"),
    (
        "layer_norm",
        [a(2, 3), a(3), a(2)],
        a(2, 3),
        EPS,
        r"a bias of the shape of the last axis of x, \(3,\); got \(2\)",
    ),
    ("layer_norm_bias", [a(2, 3), i32(3)], a(2, 3), EPS, r"a bias of float32"),
    ("rms_norm_backward", [a(2, 3), a(2, 3), a(3)], a(2, 3), EPS, r"a cotangent and a gradient of the type of x"),
    ("rms_norm_backward", [a(2, 3), a(2, 3), a(2, 3)], a(3, 2), EPS, r"a cotangent and a gradient of the type of x"),
    (
        "rms_norm_backward",
        [a(2, 3), a(3), a(2, 3), a(2, 3)],
        [a(2, 3), a(2)],
        EPS,
        r"shape of its parameter; got \(2\)",
    ),
    ("rms_norm_backward", [a(2, 3), a(3), a(2, 3), a(2, 3)], [a(2, 3), i32(3)], EPS, r"a parameter of float32"),
    ("group_norm", [a(3)], a(3), GROUPS, r"x with at least 2 axes"),
    ("group_norm", [a(3, 5)], a(3, 5), GROUPS, r"groups that divide 3 channels; got 2"),
    ("group_norm", [a(4, 5)], a(4, 5), {**EPS, "groups": np.int64(0)}, r"groups that divide 4 channels; got 0"),
    ("group_norm", [a(4, 5), a(5)], a(4, 5), GROUPS, r"a weight of the shape"),
    ("group_norm", [a(4, 5)], a(4, 6), GROUPS, r"a result of the type of x"),
    ("add_rms_norm", [a(2, 3), a(2, 4)], [a(2, 3), a(2, 3)], EPS, r"residual and results of the type of x"),
    ("add_rms_norm", [a(2, 3), a(2, 3)], [a(2, 3), a(2, 3, dtype=BF16)], EPS, r"residual and results of the type of x"),
    ("add_rms_norm", [a(2, 3), a(2, 3), a(2)], [a(2, 3), a(2, 3)], EPS, r"a weight of the shape"),
    (
        "rotary_embedding_backward",
        [a(3, 2, 4), a(3, 2), a(3, 2), a(3, 2, 4), a(3, 2, 5)],
        [a(3, 2, 4), a(3, 2), a(3, 2)],
        ASKED,
        r"a cotangent and a gradient of the type of x",
    ),
    (
        "rotary_embedding_backward",
        [a(3, 2, 4), a(3, 2), a(3, 2), a(3, 2, 4), a(3, 2, 4)],
        [a(3, 2, 4), a(3, 2), a(2, 2)],
        ASKED,
        r"gradients of the type of cos and sin; got \(2, 2\)",
    ),
    (
        "rotary_embedding_backward",
        [a(3, 2, 4), a(2, 2), a(2, 2), a(3, 2, 4), a(3, 2, 4)],
        [a(3, 2, 4), a(2, 2), a(2, 2)],
        ASKED,
        r"expected cos and sin of shape",
    ),
    ("geglu", [a(2, 4), a(2, 5)], a(2, 4), APPROXIMATE, r"gate and up of one shape and dtype"),
    ("swiglu_backward", [a(2, 4), a(2, 4), a(2, 4)], a(2, 4), {}, r"a cotangent that matches the operands; got"),
    ("swiglu_backward", [a(2, 4), a(2, 2), a(2, 2)], a(2, 5), {}, r"gradients of the type of the operands"),
    (
        "swiglu_backward",
        [a(2, 4), a(2, 4), a(2, 4), a(2, 4)],
        [a(2, 4), a(2, 4, dtype=BF16)],
        {},
        r"gradients of the type of the operands",
    ),
    ("softmax_cross_entropy", [a(2, 3), a(2)], a(2), {}, r"labels of int32"),
    ("softmax_cross_entropy", [a(2, 3), i32(2)], i32(2), {}, r"the loss of float32"),
    ("softmax_cross_entropy", [a(2, 3), i32(3)], a(2), {}, r"a label and a loss for each row .*got \(3\) and \(2\)"),
    ("softmax_cross_entropy", [a(2, 3), i32(2)], a(2, 3), {}, r"a label and a loss for each row"),
    ("softmax_cross_entropy", [a(2, 3), i32(2)], a(2), {"z_loss": np.float32(1)}, r"z_loss to be an attribute"),
    ("softmax_cross_entropy", [a(2, 3), i32(2)], a(2), {"ignore_index": "1"}, r"ignore_index to be an attribute"),
    ("softmax_cross_entropy", [a(2, 3), i32(2)], a(2), {"other": "1"}, r"no other attribute than label_smoothing"),
    ("softmax_cross_entropy", [i32(2, 3), i32(2)], a(2), {}, r"arrays of float32, bfloat16 or float16"),
    (
        "softmax_cross_entropy_backward",
        [a(2, 3), i32(2), a(2), a(3)],
        a(2, 3),
        {},
        r"a cotangent of the type of the loss",
    ),
    ("softmax_cross_entropy_backward", [a(2, 3), i32(2), a(2), a(2)], a(2, 4), {}, r"and a gradient of that of the"),
    ("lstm_gates", [a(2, 12), a(2, 4)], [a(2, 4), a(2, 4)], {}, r"gates of shape \(\*batch, 4 \* size\)"),
    ("lstm_gates", [a(2, 12), a(2, 3)], [a(2, 3), a(2, 4)], {}, r"results of the type of cell"),
    ("gru_gates", [a(2, 9), a(2, 6), a(2, 3)], a(2, 3), {}, r"gates of shape \(\*batch, 3 \* size\)"),
    ("gru_gates", [a(2, 9), a(2, 9), a(2, 3)], a(2, 4), {}, r"a result of the type of hidden"),
    ("gru_gates", [a(2, 9), a(2, 9), a(2, 3), a(2)], a(2, 3), {}, r"a bias of shape \(3,\); got \(2\)"),
    ("linear", [a(2, 5)], a(2, 3), {}, r"2 or 3 operands and one result"),
    ("linear", [a(2, 5), a(3, 5, dtype=BF16)], a(2, 3), {}, r"weight of the type of x and shape"),
    ("linear", [a(2, 5), a(3, 4)], a(2, 3), {}, r"shape \(out_features, 5\); got \(3, 4\)"),
    ("linear", [a(2, 5), a(3, 5), a(4)], a(2, 3), {}, r"bias of shape \(3,\); got \(4\)"),
    ("linear", [a(2, 5), a(3, 5), a(3, dtype=BF16)], a(2, 3), {}, r"bias of float32"),
    ("linear", [a(2, 5), a(3, 5)], a(2, 4), {}, r"a result of shape \(\*batch, out_features\)"),
    ("int8_linear", [a(2, 5), u8(3, 5), a(3)], a(2, 3), {}, r"weight of int8"),
    ("int8_linear", [a(2, 5), i8(3, 4), a(3)], a(2, 3), {}, r"weight of shape \(out_features, 5\); got \(3, 4\)"),
    ("int8_linear", [a(2, 5), i8(3, 5), a(4)], a(2, 3), {}, r"scale of shape \(3,\); got \(4\)"),
    ("int8_linear", [a(2, 5), i8(3, 5), a(3)], a(2, 4), {}, r"a result of shape \(\*batch, out_features\)"),
    ("rounded_int8_linear", [a(2, 5), u8(3, 5), a(3)], a(2, 3), {}, r"weight of int8"),
    ("swiglu", [a()], a(), {}, r"swiglu\[native\]: expected gate with at least 1 axes"),
    ("swiglu", [a(4)], a(), {}, r"swiglu\[native\]: expected the result with at least 1 axes"),
    ("swiglu", [a(2, 4)], a(2, 4), {}, r"a result that matches the operands; got \(2, 4\) for \(2, 4\)"),
    ("swiglu", [a(2, 4)], a(2), {}, r"a result that matches the operands"),
    ("swiglu", [a(2, 4)], a(3, 2), {}, r"a result that matches the operands"),
    ("swiglu", [a(2, 4), a(2, 4)], a(2, 2), {}, r"a result that matches the operands"),
    ("swiglu", [a(2, 4)], a(2, 2, dtype=BF16), {}, r"a result that matches the operands"),
    ("swiglu", [a(2, 4), a(2, 5)], a(2, 4), {}, r"gate and up of one shape and dtype; got \(2, 4\) and \(2, 5\)"),
    ("swiglu", [a(2, 4), a(2, 4, dtype=BF16)], a(2, 4), {}, r"gate and up of one shape and dtype"),
    ("swiglu", [i32(2, 4)], i32(2, 2), {}, r"arrays of float32, bfloat16 or float16"),
    ("attention", [a(4, 5), a(7, 2, 5), a(7, 2, 5)], a(4, 5), ATTENTION, r"q with at least 3 axes"),
    ("attention", [a(3, 4, 5), a(2, 5), a(2, 5)], a(3, 4, 5), ATTENTION, r"k with at least 3 axes"),
    ("attention", [a(3, 4, 5), a(7, 2, 5), a(7, 2, 5)], a(3, 4, 6), ATTENTION, r"a result of the shape of q"),
    ("attention", [a(3, 4, 5, dtype=BF16), a(7, 2, 5), a(7, 2, 5)], a(3, 4, 5, dtype=BF16), ATTENTION, r"of one dtype"),
    ("attention", [a(3, 4, 5), a(7, 2, 5), a(6, 2, 5)], a(3, 4, 5), ATTENTION, r"k and v of one shape and dtype; got"),
    ("attention", [a(3, 4, 5), a(7, 2, 5), i32(7, 2, 5)], a(3, 4, 5), ATTENTION, r"k and v of one shape and dtype"),
    (
        "attention",
        [a(3, 4, 5), a(7, 2, 6), a(7, 2, 6)],
        a(3, 4, 5),
        ATTENTION,
        r"heads of one size in q and k; got 5 and 6",
    ),
    ("attention", [a(3, 4, 5), a(7, 3, 5), a(7, 3, 5)], a(3, 4, 5), ATTENTION, HEADS + " 4 and 3"),
    ("attention", [a(3, 4, 5), a(7, 0, 5), a(7, 0, 5)], a(3, 4, 5), ATTENTION, HEADS + " 4 and 0"),
    ("attention", [a(2, 3, 4, 5), a(3, 7, 2, 5), a(3, 7, 2, 5)], a(2, 3, 4, 5), ATTENTION, r"the batch axes of q; got"),
    ("attention", [a(3, 4, 5), a(3, 7, 2, 5), a(3, 7, 2, 5)], a(3, 4, 5), ATTENTION, r"the batch axes of q"),
    ("attention", [i32(3, 4, 5), i32(7, 2, 5), i32(7, 2, 5)], i32(3, 4, 5), ATTENTION, r"float32, bfloat16 or float16"),
    *[
        ("masked_attention", [*QKV, *MORE], QKV[0], {**MASKED, name: value}, message)
        for name, value, message in (
            ("window", np.int64(-1), r"a window of 0 or more, below 2\^30"),
            ("window", np.int64(2**40), r"a window of 0 or more"),
            ("soft_cap", np.float64(-1), r"a soft_cap of 0 or more, and dropout from 0 up to 1"),
            ("dropout", np.float64(1), r"dropout from 0 up to 1"),
            ("dropout", np.float64(np.nan), r"dropout from 0 up to 1"),
            ("operands", "bias", r"as many operands as there are names"),
            ("operands", "bias,alibi_slopes,dropout_keys,mask", r"an operand for each name; got none for mask"),
            ("operands", "bias,alibi_slopes,other", r"known names of operands; got other"),
            ("operands", "mask,alibi_slopes,dropout_keys", r"mask of its dtype: bool, float32, int32 or uint32"),
        )
    ],
    *[
        ("masked_attention", [*QKV, x], QKV[0], {**MASKED, "operands": name}, message)
        for name, x, message in (
            ("bias", a(3, 7), r"bias with at least 3 axes; got the shape \(3, 7\)"),
            ("bias", a(2, 3, 7), r"bias that fits queries, heads and keys; got \(2, 3, 7\)"),
            ("bias", a(4, 3, 8), r"bias that fits queries, heads and keys"),
            ("bias", i32(4, 3, 7), r"arrays of float32, bfloat16 or float16"),
            ("bias", a(3, 4, 3, 7), r"bias with the batch axes of q, or 1; got \(2, 3, 4, 5\) and \(3, 4, 3, 7\)"),
            ("bias", a(1, 2, 4, 3, 7), r"bias with the batch axes of q, or 1"),
            ("alibi_slopes", a(3), r"alibi_slopes that fits"),
            ("lengths", i32(3), r"lengths with the batch axes of q, or 1"),
            ("lengths", a(2), r"lengths of its dtype"),
            ("key_segments", i32(7), r"segments of queries and of keys, or none"),
            ("query_segments", i32(7), r"query_segments that fits"),
        )
    ],
    ("attention_backward", [*QKV, QKV[0], a(2, 3, 4, 6)], QKV, ATTENTION, r"a cotangent of the type of q"),
    ("attention_backward", [*QKV, QKV[0], QKV[0]], [QKV[0], QKV[1], a(7, 2, 6)], ATTENTION, r"got \(7, 2, 6\) for"),
    ("attention_backward", [*QKV, QKV[0], QKV[0]], [*QKV, QKV[0]], ATTENTION, r"no other results than gradients"),
    ("masked_attention_backward", [*QKV, *MORE, QKV[0], QKV[0]], QKV, MASKED, r"a gradient of each operand of a float"),
    ("decode_attention", [a(5), a(7, 2, 5), a(7, 2, 5), i32()], a(5), SCALE, r"q with at least 2 axes"),
    ("decode_attention", [a(4, 5), a(2, 5), a(2, 5), i32()], a(4, 5), SCALE, r"k with at least 3 axes"),
    (
        "decode_attention",
        [a(4, 5), a(7, 2, 5), a(7, 2, 5), i32()],
        a(4, 6),
        SCALE,
        r"a result of the shape and dtype of q",
    ),
    ("decode_attention", [a(4, 5), a(7, 3, 5), a(7, 3, 5), i32()], a(4, 5), SCALE, HEADS + " 4 and 3"),
    ("decode_attention", [a(4, 5), a(7, 2, 6), a(7, 2, 6), i32()], a(4, 5), SCALE, r"heads of one size in q and k"),
    ("decode_attention", [a(4, 5), a(7, 2, 5), a(7, 2, 5), a()], a(4, 5), SCALE, r"length of int32"),
    (
        "decode_attention",
        [a(4, 5), a(7, 2, 5), a(7, 2, 5), i32(2)],
        a(4, 5),
        SCALE,
        r"k, v and length with the batch axes",
    ),
    ("decode_attention", [a(2, 4, 5), a(7, 2, 5), a(7, 2, 5), i32(3)], a(2, 4, 5), SCALE, r"with the batch axes of q"),
    *[
        ("int8_decode_attention", [a(4, 5), k, k, k_scale, v_scale, i32()], a(4, 5), DECODE, message)
        for k, k_scale, v_scale, message in (
            (a(7, 2, 5), a(7, 2), a(7, 2), r"k of int8"),
            (i8(7, 2, 5), a(7), a(7), r"scales of the shape of k without its last axis; got \(7\) for \(7, 2, 5\)"),
            (i8(7, 2, 5), a(7, 2), a(2, 7), r"scales of the shape of k without its last axis"),
            (i8(7, 2, 5), i8(7, 2), a(7, 2), r"k_scale of float32"),
            (i8(7, 2, 5), a(7, 2), i32(7, 2), r"v_scale of float32"),
        )
    ],
    *[
        ("masked_decode_attention", [a(4, 5), *QKV[1:], i32(), slopes], a(4, 5), {**DECODE, **more}, message)
        for slopes, more, message in (
            (a(3), {}, r"a slope for each head; got the shape \(3\)"),
            (a(2, 4), {}, r"slopes with the batch axes of q, or 1"),
            (i32(4), {}, r"slopes of float32"),
            (a(4), {"window": np.int64(-1)}, r"a window and a soft_cap of 0 or more"),
            (a(4), {"soft_cap": np.float64(-1)}, r"a window and a soft_cap of 0 or more"),
        )
    ],
    ("cache_append", [a(7, 3), a(1, 3), i32()], a(7, 3), {"row_rank": np.int64(-1)}, r"expected row_rank of 0 or more"),
    ("cache_append", [a(7, 3), a(1, 3), i32()], a(7, 3), {"row_rank": np.int64(2)}, r"cache with at least 3 axes"),
    ("cache_append", [a(7, 3), a(1, 3), i32()], a(7, 3), {"row_rank": np.int64(2**63 - 1)}, r"cache with at least"),
    ("cache_append", [a(7, 3), a(3), i32()], a(7, 3), ROWS, r"rows with at least 2 axes"),
    ("cache_append", [a(7, 3), a(1, 3), i32()], a(7, 4), ROWS, r"a result of the type of cache"),
    ("cache_append", [a(7, 3), a(1, 4), i32()], a(7, 3), ROWS, r"rows that fit into the cache of shape \(7, 3\); got"),
    ("cache_append", [a(7, 3), a(8, 3), i32()], a(7, 3), ROWS, r"rows that fit into the cache"),
    ("cache_append", [a(7, 3), i32(1, 3), i32()], a(7, 3), ROWS, r"rows that fit into the cache"),
    ("cache_append", [a(2, 7, 3), a(1, 3), i32()], a(2, 7, 3), ROWS, r"rows that fit into the cache"),
    ("cache_append", [a(7, 3), a(2, 1, 3), i32()], a(7, 3), ROWS, r"rows that fit into the cache"),
    ("cache_append", [a(7, 3), a(1, 3), a()], a(7, 3), ROWS, r"position of int32"),
    ("cache_append", [a(7, 3), a(1, 3), i32(2)], a(7, 3), ROWS, r"a position for each cache; got the shape \(2\)"),
    ("cache_append", [a(7, 3), a(1, 3), i32()], a(7, 3), ROWS, r"the result in the memory of the cache"),
    ("quantized_linear", [a(32), u8(3, 34)], a(3), {"encoding": "Q4_0"}, r"the encoding Q4_1 or Q8_0; got Q4_0"),
    ("quantized_linear", [a(32), u8(3, 34)], a(3), {"encoding": ""}, r"the encoding Q4_1 or Q8_0; got \."),
    ("quantized_linear", [a(), u8(3, 34)], a(3), Q8, r"x with at least 1 axes"),
    ("quantized_linear", [a(32), u8(3, 34)], a(), Q8, r"the result with at least 1 axes"),
    ("quantized_linear", [a(32), a(3, 34)], a(3), Q8, r"blocks of uint8"),
    ("quantized_linear", [a(33), u8(3, 34)], a(3), Q8, r"bytes of 33 weights in blocks of 32\); got \(3, 34\)"),
    ("quantized_linear", [a(64), u8(3, 34)], a(3), Q8, r"blocks of shape \(out_features, bytes of 64 weights"),
    ("quantized_linear", [a(32), u8(102)], a(3), Q8, r"blocks of shape \(out_features"),
    ("quantized_linear", [a(32), u8(1, 3, 34)], a(3), Q8, r"blocks of shape \(out_features"),
    ("quantized_linear", [a(32), u8(3, 34)], a(4), Q8, r"a result of shape \(\*batch, out_features\); got \(4\)"),
    ("quantized_linear", [a(2, 32), u8(3, 34)], a(3), Q8, r"a result of shape \(\*batch, out_features\)"),
    ("quantized_linear", [a(2, 32), u8(3, 34)], a(5, 3), Q8, r"a result of shape \(\*batch, out_features\)"),
    ("quantized_linear", [a(32), u8(3, 34)], a(3, dtype=BF16), Q8, r"a result of shape \(\*batch, out_features\)"),
    ("quantized_linear", [i32(32), u8(3, 34)], i32(3), Q8, r"arrays of float32, bfloat16 or float16"),
]


@pytest.mark.parametrize(("op", "args", "result", "attributes", "message"), WRONG)
def test_refused(op, args, result, attributes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"INVALID_ARGUMENT: {op}\[native\]: ") as error:
        call(op, args, result, attributes)
    error.match(message)


@pytest.mark.parametrize("op", GOOD)
def test_wrong_numbers_of_operands_and_results(op):
    args, result, attributes = GOOD[op]
    few = {
        "add_rms_norm": 0,
        "gru_gates": 0,
        "linear": 1,
        "masked_decode_attention": 3,
        "int8_decode_attention": 5,
    }  # the last ones are optional
    optional = ("rms_norm", "layer_norm", "layer_norm_bias", "group_norm", "group_norm_bias", "swiglu", "geglu")
    one_too_few = args[: {**few, **dict.fromkeys(optional, 0)}.get(op, -1)]
    results = result if isinstance(result, list) else [result]
    for wrong_args, wrong_result in (
        (one_too_few, result),
        ([*args, a(1)], result),
        (args, []),
        (args, [*results, results[0]]),
    ):
        with pytest.raises(
            jax.errors.JaxRuntimeError,
            match=r"operands and|a result for each|[Ww]rong number of|expected q, k, v|as many operands as"
            r"|q, k, v, (their scales, )?length and perhaps slopes|no other results|q, k and the result of one dtype"
            r"|a cotangent of the type of q|got none for|[a-z]+ that fits",
        ):
            call(op, wrong_args, wrong_result, attributes)


@pytest.mark.parametrize("op", [op for op, (_, _, attributes) in GOOD.items() if attributes])
def test_wrong_attributes(op):
    args, result, attributes = GOOD[op]
    first = next(iter(attributes))
    for wrong in (
        {},
        {**attributes, "other": np.int64(1)},
        {**attributes, first: np.float32(1)},
        {**attributes, first: np.arange(3, dtype=np.float32)},
        {**attributes, first: "1" if attributes is not Q8 else np.int64(1)},
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"attribute|data type|[Aa]ttr"):
            call(op, args, result, wrong)


def test_the_process_is_well_afterwards():
    with pytest.raises(jax.errors.JaxRuntimeError, match="rms_norm"):
        call("rms_norm", [a(2, 3)], a(2, 4), EPS)
    assert jnp.zeros(3).sum() == 0
    test_accepted("rms_norm")
