"""The handlers in C++ trust nobody: called by hand, with what the functions of `ops` would never pass."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eqxcallback import _ext, xla

from .families import FAMILIES


BF16 = ml_dtypes.bfloat16
EPS = {"eps": np.float64(1e-5)}
RMS = {**EPS, "center": np.bool_(False)}
SCALE = {"scale": np.float64(1)}
ATTENTION = {
    "causal": np.bool_(True),
    **SCALE,
    "window": np.int64(2),
    "soft_cap": np.float64(0),
    "dropout": np.float64(0.5),
}
DECODE = {**SCALE, "window": np.int64(0), "soft_cap": np.float64(2)}
ROWS = {"row_rank": np.int64(1)}
Q8 = {"encoding": "Q8_0", "activations": "int8"}
EXACT = {"activations": "exact"}
GROUPS = {**EPS, "groups": np.int64(2)}
SILU = {"activation": "silu"}


def present(*slots, **options):
    """`options`, and the mask of these operands."""
    return {**options, "present": np.int64(mask(slots))}


def needs(slots, gradients, **options):
    """The masks of operands and of gradients."""
    return {**present(*slots, **options), "needs_grad": np.int64(mask(gradients))}


def mask(slots):
    return sum(1 << slot for slot in slots)


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
SLOTS = (0, 1, 2, 3, 5, 10)  # of them
DECODED = [a(2, 4, 5), a(2, 7, 2, 5), a(2, 7, 2, 5), i32()]
INT8_DECODED = [a(2, 4, 5), i8(2, 7, 2, 5), i8(2, 7, 2, 5), i32(), a(4), a(2, 7, 2), a(2, 7, 2)]
ROTARY_BACKWARD = [a(2, 3, 2, 4), a(3, 2), a(3, 2), a(2, 3, 2, 4), a(2, 3, 2, 4)]
# By a name that begins with the symbol.
GOOD = {
    "norm": ([a(2, 3), a(3), a(3)], a(2, 3), present(0, 1, 2, **RMS)),
    "norm, plain": ([a(2, 3)], a(2, 3), present(0, **RMS)),
    "norm, a bias": ([a(2, 3), a(3)], a(2, 3), present(0, 2, **RMS)),
    "norm_backward": (
        [a(2, 3), a(3), a(3), a(2, 3), a(2, 3)],
        [a(2, 3), a(3), a(3)],
        needs((0, 1, 2), (0, 1, 2), **RMS),
    ),
    "norm_backward, a bias": ([a(2, 3), a(3), a(2, 3), a(2, 3)], [a(2, 3), a(3)], needs((0, 2), (0, 2), **RMS)),
    "norm_backward, of x": ([a(2, 3), a(3), a(2, 3), a(2, 3)], a(2, 3), needs((0, 1), (0,), **RMS)),
    "norm_backward, of a bias": ([a(2, 3), a(3), a(3), a(2, 3), a(2, 3)], a(3), needs((0, 1, 2), (2,), **RMS)),
    "group_norm": ([a(2, 4, 3), a(4), a(4)], a(2, 4, 3), present(0, 1, 2, **GROUPS)),
    "group_norm, a bias": ([a(2, 4, 3), a(4)], a(2, 4, 3), present(0, 2, **GROUPS)),
    "group_norm_backward": (
        [a(2, 4, 3), a(4), a(4), a(2, 4, 3), a(2, 4, 3)],
        [a(2, 4, 3), a(4), a(4)],
        needs((0, 1, 2), (0, 1, 2), **GROUPS),
    ),
    "group_norm_backward, of a bias": ([a(2, 4, 3), a(4), a(2, 4, 3), a(2, 4, 3)], a(4), needs((0, 2), (2,), **GROUPS)),
    "add_rms_norm": ([a(2, 3), a(2, 3), a(3)], [a(2, 3), a(2, 3)], present(0, 1, 2, **EPS)),
    "add_rms_norm, plain": ([a(2, 3), a(2, 3)], [a(2, 3), a(2, 3)], present(0, 1, **EPS)),
    "rotary_embedding": ([a(2, 3, 2, 4), a(3, 2), a(3, 2)], a(2, 3, 2, 4), {}),
    "rotary_embedding_backward": (
        ROTARY_BACKWARD,
        [a(2, 3, 2, 4), a(3, 2), a(3, 2)],
        {"needs_grad": np.int64(7)},
    ),
    "rotary_embedding_backward, of x": (ROTARY_BACKWARD, a(2, 3, 2, 4), {"needs_grad": np.int64(1)}),
    "rotary_embedding_backward, of sin": (ROTARY_BACKWARD, a(3, 2), {"needs_grad": np.int64(4)}),
    "glu": ([a(2, 4), a(2, 4)], a(2, 4), present(0, 1, **SILU)),
    "glu, packed": ([a(2, 8)], a(2, 4), present(0, activation="gelu")),
    "glu_backward": (
        [a(2, 4), a(2, 4), a(2, 4), a(2, 4)],
        [a(2, 4), a(2, 4)],
        needs((0, 1), (0, 1), activation="gelu_tanh"),
    ),
    "glu_backward, packed": ([a(2, 8), a(2, 4), a(2, 4)], a(2, 8), needs((0,), (0,), **SILU)),
    "glu_backward, of up": ([a(2, 4), a(2, 4), a(2, 4), a(2, 4)], a(2, 4), needs((0, 1), (1,), **SILU)),
    "softmax_cross_entropy": ([a(2, 1), i32(2)], a(2), {}),
    "softmax_cross_entropy_backward": ([a(2, 3), i32(2), a(2), a(2)], a(2, 3), {}),
    "lstm_gates": ([a(2, 12), a(2, 3)], [a(2, 3), a(2, 3)], {}),
    "gru_gates": ([a(2, 9), a(2, 9), a(2, 3), a(3)], a(2, 3), present(0, 1, 2, 3)),
    "gru_gates, plain": ([a(2, 9), a(2, 9), a(2, 3)], a(2, 3), present(0, 1, 2)),
    "lstm_gates_backward": (
        [a(2, 12), *[a(2, 3)] * 5],
        [a(2, 12), a(2, 3)],
        needs((0, 1), (0, 1)),
    ),
    "lstm_gates_backward, of cell": ([a(2, 12), *[a(2, 3)] * 5], a(2, 3), needs((0, 1), (1,))),
    "gru_gates_backward": (
        [a(2, 9), a(2, 9), a(2, 3), a(3), a(2, 3), a(2, 3)],
        [a(2, 9), a(2, 9), a(2, 3), a(3)],
        needs((0, 1, 2, 3), (0, 1, 2, 3)),
    ),
    "gru_gates_backward, of hidden": ([a(2, 9), a(2, 9), *[a(2, 3)] * 3], a(2, 3), needs((0, 1, 2), (2,))),
    "linear": ([a(2, 5), a(3, 5), a(3)], a(2, 3), present(0, 1, 2)),
    "linear, plain": ([a(2, 5), a(3, 5)], a(2, 3), present(0, 1)),
    "int8_linear": ([a(2, 5), i8(3, 5), a(3)], a(2, 3), EXACT),
    "int8_linear, int8": ([a(2, 5), i8(3, 5), a(3)], a(2, 3), {"activations": "int8"}),
    "attention": ([*QKV, *MORE], QKV[0], present(*SLOTS, **ATTENTION)),
    "attention, plain": (QKV, QKV[0], present(0, 1, 2, **ATTENTION)),
    "attention_backward": (
        [*QKV, *MORE, QKV[0], QKV[0]],
        [*QKV, *MORE[:2]],
        needs(SLOTS, (0, 1, 2, 3, 5), **ATTENTION),
    ),
    "attention_backward, plain": ([*QKV, QKV[0], QKV[0]], QKV, needs((0, 1, 2), (0, 1, 2), **ATTENTION)),
    "attention_backward, of q": ([*QKV, QKV[0], QKV[0]], QKV[0], needs((0, 1, 2), (0,), **ATTENTION)),
    "attention_backward, of v": ([*QKV, QKV[0], QKV[0]], QKV[2], needs((0, 1, 2), (2,), **ATTENTION)),
    "attention_backward, of a bias": ([*QKV, *MORE, QKV[0], QKV[0]], MORE[0], needs(SLOTS, (3,), **ATTENTION)),
    "decode_attention": ([*DECODED, a(4)], DECODED[0], present(0, 1, 2, 3, 4, **DECODE)),
    "decode_attention, plain": (DECODED, DECODED[0], present(0, 1, 2, 3, **DECODE)),
    "decode_attention, int8": (INT8_DECODED, INT8_DECODED[0], present(*range(7), **DECODE)),
    "decode_attention, shared scales": (
        [*INT8_DECODED[:4], a(7, 2), a(2, 7, 2)],
        INT8_DECODED[0],
        present(0, 1, 2, 3, 5, 6, **DECODE),
    ),
    "cache_append": ([a(2, 7, 3), a(2, 1, 3), i32()], a(2, 7, 3), ROWS),
    "quantized_linear": ([a(2, 32), u8(3, 34)], a(2, 3), Q8),
}
# Tables of families have some: these, and those that are refused.
for _family in FAMILIES.values():
    GOOD |= getattr(_family, "HANDLED", {})


def symbol_of(case):
    return case.split(",")[0]


@pytest.mark.parametrize("case", GOOD)
def test_accepted(case):
    op, (args, result, attributes) = symbol_of(case), GOOD[case]
    found = call(op, args, result, attributes, aliases={0: 0} if op == "cache_append" else None)
    for out, want in zip(found, result if isinstance(result, list) else [result], strict=True):
        np.testing.assert_array_equal(out, want)


def test_every_handler_is_here():
    assert set(_ext.cpu_ops()) == set(map(symbol_of, GOOD))


ROTARY = r"rotary_embedding\[native\]: expected cos and sin of shape"
HEADS = r"expected a number of query heads that is a multiple of the key/value heads; got"
X, XW, XWB = present(0, **RMS), present(0, 1, **RMS), present(0, 1, 2, **RMS)
GROUP = present(0, **GROUPS)
ADD = present(0, 1, **EPS)
DX, DXW = needs((0,), (0,), **RMS), needs((0, 1), (0, 1), **RMS)
BOTH, PACKED = present(0, 1, **SILU), present(0, **SILU)
D_BOTH, D_PACKED = needs((0, 1), (0, 1), **SILU), needs((0,), (0,), **SILU)
LINEAR = present(0, 1)
PLAIN, D_PLAIN = present(0, 1, 2, **ATTENTION), needs((0, 1, 2), (0, 1, 2), **ATTENTION)
MASKED = present(*SLOTS, **ATTENTION)
DECODING, WITHOUT_LENGTH = present(0, 1, 2, 3, **DECODE), present(0, 1, 2, **DECODE)
TABLE = {"needs_grad": np.int64(7)}
OF_TYPES = r"gradients of the types of the operands; got "
WRONG = [
    ("norm", [a(2, 3)], a(2, 4), X, r"norm\[native\]: expected a result of the type of x\."),
    ("norm", [a(2, 3)], a(2, 3, dtype=BF16), X, r"expected a result of the type of x"),
    ("norm", [a()], a(), X, r"norm\[native\]: expected x with at least 1 axes; got the shape \(\)"),
    ("norm", [i32(3)], i32(3), X, r"norm\[native\]: expected arrays of float32, bfloat16 or float16"),
    ("norm", [a(2, 3), a(4)], a(2, 3), XW, r"a weight of shape \(3,\); got \(4\)"),
    ("norm", [a(2, 3), a(2, 3)], a(2, 3), XW, r"a weight of shape \(3,\); got \(2, 3\)"),
    ("norm", [a(2, 3), a(3, dtype=BF16)], a(2, 3), XW, r"norm\[native\]: expected a weight of float32"),
    ("norm", [a(2, 3), a(3), a(2)], a(2, 3), XWB, r"a bias of shape \(3,\); got \(2\)"),
    ("norm", [a(2, 3), i32(3)], a(2, 3), present(0, 2, **RMS), r"a bias of float32"),
    ("norm", [a(2, 3), a(3)], a(2, 3), XWB, r"3 operands, 3 of them in the mask `present`; got 2"),
    ("norm", [a(2, 3), a(3)], a(2, 3), X, r"1 operands, 1 of them in the mask `present`; got 2"),
    ("norm", [a(3), a(3)], a(3), present(1, 2, **RMS), r"x to be present; got the mask 6"),
    ("norm", [a(2, 3)], a(2, 3), present(3, **RMS), r"present to be a mask of 3 bits; got 8"),
    ("norm", [a(2, 3)], a(2, 3), {**X, "present": np.int64(-1)}, r"present to be a mask of 3 bits; got -1"),
    ("norm", [a(2, 3)], a(2, 3), {**X, "present": np.int64(0)}, r"x to be present; got the mask 0"),
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
    ("norm_backward", [a(2, 3), a(2, 3), a(3)], a(2, 3), DX, r"a cotangent of the type of x"),
    ("norm_backward", [a(2, 3), a(2, 3), a(2, 3)], a(3, 2), DX, OF_TYPES + r"\(3, 2\) for \(2, 3\)"),
    ("norm_backward", [a(2, 3), a(2, 3), a(2, 3)], a(2, 3, dtype=BF16), DX, OF_TYPES),
    ("norm_backward", [a(2, 3), a(3), a(2, 3), a(2, 3)], [a(2, 3), a(2)], DXW, OF_TYPES + r"\(2\) for \(3\)"),
    ("norm_backward", [a(2, 3), a(3), a(2, 3), a(2, 3)], [a(2, 3), i32(3)], DXW, OF_TYPES),
    ("norm_backward", [a(2, 3), a(2), a(2, 3), a(2, 3)], [a(2, 3), a(2)], DXW, r"a weight of shape \(3,\); got \(2\)"),
    (
        "norm_backward",
        [a(2, 3), a(2), a(2, 3), a(2, 3)],
        [a(2, 3), a(2)],
        needs((0, 2), (0, 2), **RMS),
        r"a bias of shape \(3,\); got \(2\)",
    ),
    ("norm_backward", [a(2, 3), a(2, 3), a(2, 3)], [a(2, 3), a(3)], DX, r"1 results, one for each operand in the mask"),
    ("norm_backward", [a(2, 3), a(2, 3), a(2, 3)], a(3), needs((0,), (1,), **RMS), r"operands that are present"),
    (
        "norm_backward",
        [a(2, 3), a(2, 3), a(2, 3)],
        a(3),
        needs((0,), (3,), **RMS),
        r"needs_grad to be a mask of 3 bits",
    ),
    (
        "norm_backward",
        [a(2, 3), a(2, 3), a(2, 3)],
        a(2, 3),
        {**DX, "needs_grad": np.int64(-1)},
        r"needs_grad to be a mask of 3 bits; got -1",
    ),
    ("norm_backward", [a(2, 3), a(2, 3)], a(2, 3), DX, r"3 operands, 1 of them in the mask `present`; got 2"),
    ("group_norm", [a(3)], a(3), GROUP, r"x with at least 2 axes"),
    ("group_norm", [a(3, 5)], a(3, 5), GROUP, r"groups that divide 3 channels; got 2"),
    ("group_norm", [a(4, 5)], a(4, 5), {**GROUP, "groups": np.int64(0)}, r"groups that divide 4 channels; got 0"),
    (
        "group_norm_backward",
        [a(2, 4, 3), a(2, 4, 3), a(2, 4, 4)],
        a(2, 4, 3),
        needs((0,), (0,), **GROUPS),
        r"a cotangent of the type of x",
    ),
    ("group_norm", [a(4, 5), a(5)], a(4, 5), present(0, 1, **GROUPS), r"a weight of shape \(4,\); got \(5\)"),
    ("group_norm", [a(4, 5)], a(4, 6), GROUP, r"a result of the type of x"),
    ("add_rms_norm", [a(2, 3), a(2, 4)], [a(2, 3), a(2, 3)], ADD, r"residual and results of the type of x"),
    ("add_rms_norm", [a(2, 3), a(2, 3)], [a(2, 3), a(2, 3, dtype=BF16)], ADD, r"residual and results of the type of x"),
    (
        "add_rms_norm",
        [a(2, 3), a(2, 3), a(2)],
        [a(2, 3), a(2, 3)],
        present(0, 1, 2, **EPS),
        r"a weight of shape \(3,\); got \(2\)",
    ),
    (
        "rotary_embedding_backward",
        [a(3, 2, 4), a(3, 2), a(3, 2), a(3, 2, 4), a(3, 2, 5)],
        [a(3, 2, 4), a(3, 2), a(3, 2)],
        TABLE,
        r"a cotangent of the type of x",
    ),
    (
        "rotary_embedding_backward",
        [a(3, 2, 4), a(3, 2), a(3, 2), a(3, 2, 4), a(3, 2, 4)],
        [a(3, 2, 4), a(3, 2), a(2, 2)],
        TABLE,
        OF_TYPES + r"\(2, 2\) for \(3, 2\)",
    ),
    (
        "rotary_embedding_backward",
        [a(3, 2, 4), a(2, 2), a(2, 2), a(3, 2, 4), a(3, 2, 4)],
        [a(3, 2, 4), a(2, 2), a(2, 2)],
        TABLE,
        r"expected cos and sin of shape",
    ),
    (
        "rotary_embedding_backward",
        ROTARY_BACKWARD,
        a(3, 2),
        {"needs_grad": np.int64(8)},
        r"to be a mask of 3 bits; got 8",
    ),
    ("rotary_embedding_backward", ROTARY_BACKWARD, a(3, 2), TABLE, r"3 results, one for each operand in the mask"),
    ("glu", [a(2, 4), a(2, 5)], a(2, 4), present(0, 1, activation="gelu"), r"gate and up of one shape and dtype"),
    ("glu", [a(2, 4), a(2, 4)], a(2, 4), present(0, 1, activation="relu"), r"silu, gelu or gelu_tanh; got relu"),
    (
        "glu_backward",
        [a(2, 4), a(2, 4), a(2, 4)],
        a(2, 4),
        D_PACKED,
        r"a cotangent that matches the operands; got \(2, 4\) for \(2, 4\)",
    ),
    ("glu_backward", [a(2, 4), a(2, 2), a(2, 2)], a(2, 5), D_PACKED, OF_TYPES + r"\(2, 5\) for \(2, 4\)"),
    ("glu_backward", [a(2, 4), a(2, 4), a(2, 4), a(2, 4)], [a(2, 4), a(2, 4, dtype=BF16)], D_BOTH, OF_TYPES),
    (
        "glu_backward",
        [a(2, 4), a(2, 4), a(2, 4), a(2, 4)],
        a(2, 4),
        {**D_BOTH, "activation": ""},
        r"2 results, one for",
    ),
    ("glu_backward", [a(2, 4), a(2, 5), a(2, 4), a(2, 4)], [a(2, 4), a(2, 5)], D_BOTH, r"gate and up of one shape"),
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
    ("gru_gates", [a(2, 9), a(2, 6), a(2, 3)], a(2, 3), present(0, 1, 2), r"gates of shape \(\*batch, 3 \* size\)"),
    ("gru_gates", [a(2, 9), a(2, 9), a(2, 3)], a(2, 4), present(0, 1, 2), r"a result of the type of hidden"),
    (
        "gru_gates",
        [a(2, 9), a(2, 9), a(2, 3), a(2)],
        a(2, 3),
        present(0, 1, 2, 3),
        r"a bias of shape \(3,\); got \(2\)",
    ),
    (
        "lstm_gates_backward",
        [a(2, 12), *[a(2, 3)] * 4, a(2, 4)],
        a(2, 3),
        needs((0, 1), (1,)),
        r"cotangents of the type of cell",
    ),
    (
        "lstm_gates_backward",
        [a(2, 9), *[a(2, 3)] * 5],
        a(2, 3),
        needs((0, 1), (1,)),
        r"gates of shape \(\*batch, 4 \* size\)",
    ),
    (
        "gru_gates_backward",
        [a(2, 9), a(2, 9), *[a(2, 3)] * 2, a(2, 4)],
        a(2, 3),
        needs((0, 1, 2), (2,)),
        r"a cotangent of the type of hidden",
    ),
    ("linear", [a(2, 5)], a(2, 3), present(0), r"weight to be present; got the mask 1"),
    ("linear", [a(2, 5), a(3, 5, dtype=BF16)], a(2, 3), LINEAR, r"weight of the type of x and shape"),
    ("linear", [a(2, 5), a(3, 4)], a(2, 3), LINEAR, r"shape \(out_features, 5\); got \(3, 4\)"),
    ("linear", [a(2, 5), a(3, 5), a(4)], a(2, 3), present(0, 1, 2), r"bias of shape \(3,\); got \(4\)"),
    ("linear", [a(2, 5), a(3, 5), a(3, dtype=BF16)], a(2, 3), present(0, 1, 2), r"bias of float32"),
    ("linear", [a(2, 5), a(3, 5)], a(2, 4), LINEAR, r"a result of shape \(\*batch, out_features\)"),
    ("int8_linear", [a(2, 5), u8(3, 5), a(3)], a(2, 3), EXACT, r"weight of int8"),
    ("int8_linear", [a(2, 5), i8(3, 4), a(3)], a(2, 3), EXACT, r"weight of shape \(out_features, 5\); got \(3, 4\)"),
    ("int8_linear", [a(2, 5), i8(3, 5), a(4)], a(2, 3), EXACT, r"scale of shape \(3,\); got \(4\)"),
    ("int8_linear", [a(2, 5), i8(3, 5), a(3)], a(2, 4), EXACT, r"a result of shape \(\*batch, out_features\)"),
    ("int8_linear", [a(2, 5), i8(3, 5), a(3)], a(2, 3), {"activations": "bf16"}, r"exact or int8; got bf16"),
    ("glu", [a()], a(), PACKED, r"glu\[native\]: expected gate with at least 1 axes"),
    ("glu", [a(4)], a(), PACKED, r"glu\[native\]: expected a result with at least 1 axes"),
    ("glu", [a(2, 4)], a(2, 4), PACKED, r"a result that matches the operands; got \(2, 4\) for \(2, 4\)"),
    ("glu", [a(2, 4)], a(2), PACKED, r"a result that matches the operands"),
    ("glu", [a(2, 4)], a(3, 2), PACKED, r"a result that matches the operands"),
    ("glu", [a(2, 4), a(2, 4)], a(2, 2), BOTH, r"a result that matches the operands"),
    ("glu", [a(2, 4)], a(2, 2, dtype=BF16), PACKED, r"a result that matches the operands"),
    ("glu", [a(2, 4), a(2, 5)], a(2, 4), BOTH, r"gate and up of one shape and dtype; got \(2, 4\) and \(2, 5\)"),
    ("glu", [a(2, 4), a(2, 4, dtype=BF16)], a(2, 4), BOTH, r"gate and up of one shape and dtype"),
    ("glu", [i32(2, 4)], i32(2, 2), PACKED, r"arrays of float32, bfloat16 or float16"),
    ("attention", [a(4, 5), a(7, 2, 5), a(7, 2, 5)], a(4, 5), PLAIN, r"q with at least 3 axes"),
    ("attention", [a(3, 4, 5), a(2, 5), a(2, 5)], a(3, 4, 5), PLAIN, r"k with at least 3 axes"),
    ("attention", [a(3, 4, 5), a(7, 2, 5), a(7, 2, 5)], a(3, 4, 6), PLAIN, r"a result of the shape of q"),
    ("attention", [a(3, 4, 5, dtype=BF16), a(7, 2, 5), a(7, 2, 5)], a(3, 4, 5, dtype=BF16), PLAIN, r"of one dtype"),
    ("attention", [a(3, 4, 5), a(7, 2, 5), a(6, 2, 5)], a(3, 4, 5), PLAIN, r"k and v of one shape and dtype; got"),
    ("attention", [a(3, 4, 5), a(7, 2, 5), i32(7, 2, 5)], a(3, 4, 5), PLAIN, r"k and v of one shape and dtype"),
    (
        "attention",
        [a(3, 4, 5), a(7, 2, 6), a(7, 2, 6)],
        a(3, 4, 5),
        PLAIN,
        r"heads of one size in q and k; got 5 and 6",
    ),
    ("attention", [a(3, 4, 5), a(7, 3, 5), a(7, 3, 5)], a(3, 4, 5), PLAIN, HEADS + " 4 and 3"),
    ("attention", [a(3, 4, 5), a(7, 0, 5), a(7, 0, 5)], a(3, 4, 5), PLAIN, HEADS + " 4 and 0"),
    ("attention", [a(2, 3, 4, 5), a(3, 7, 2, 5), a(3, 7, 2, 5)], a(2, 3, 4, 5), PLAIN, r"the batch axes of q; got"),
    ("attention", [a(3, 4, 5), a(3, 7, 2, 5), a(3, 7, 2, 5)], a(3, 4, 5), PLAIN, r"the batch axes of q"),
    ("attention", [i32(3, 4, 5), i32(7, 2, 5), i32(7, 2, 5)], i32(3, 4, 5), PLAIN, r"float32, bfloat16 or float16"),
    *[
        ("attention", [*QKV, *MORE], QKV[0], {**MASKED, name: value}, message)
        for name, value, message in (
            ("window", np.int64(-1), r"a window of 0 or more, below 2\^30"),
            ("window", np.int64(2**40), r"a window of 0 or more"),
            ("soft_cap", np.float64(-1), r"a soft_cap of 0 or more, and dropout from 0 up to 1"),
            ("dropout", np.float64(1), r"dropout from 0 up to 1"),
            ("dropout", np.float64(np.nan), r"dropout from 0 up to 1"),
            ("present", np.int64(mask((0, 1, 2, 3))), r"4 operands, 4 of them in the mask `present`; got 6"),
            ("present", np.int64(mask((*SLOTS, 4))), r"7 operands, 7 of them in the mask `present`; got 6"),
            ("present", np.int64(mask((0, 1, 2, 4, 5, 10))), r"mask of its dtype: bool, float32, int32 or uint32"),
            ("present", np.int64(mask((0, 1, 3, 4, 5, 10))), r"v to be present; got the mask"),
            ("present", np.int64(1 << 12), r"present to be a mask of 12 bits; got 4096"),
            ("present", np.int64(-1), r"present to be a mask of 12 bits; got -1"),
        )
    ],
    *[
        ("attention", [*QKV, x], QKV[0], present(0, 1, 2, slot, **ATTENTION), message)
        for slot, x, message in (
            (3, a(3, 7), r"bias with at least 3 axes; got the shape \(3, 7\)"),
            (3, a(2, 3, 7), r"bias that fits queries, heads and keys; got \(2, 3, 7\)"),
            (3, a(4, 3, 8), r"bias that fits queries, heads and keys"),
            (3, i32(4, 3, 7), r"arrays of float32, bfloat16 or float16"),
            (3, a(3, 4, 3, 7), r"bias with the batch axes of q, or 1; got \(2, 3, 4, 5\) and \(3, 4, 3, 7\)"),
            (3, a(1, 2, 4, 3, 7), r"bias with the batch axes of q, or 1"),
            (5, a(3), r"alibi_slopes that fits"),
            (8, i32(3), r"lengths with the batch axes of q, or 1"),
            (8, a(2), r"lengths of its dtype"),
            (7, i32(7), r"segments of queries and of keys, or none"),
            (6, i32(7), r"query_segments that fits"),
        )
    ],
    ("attention_backward", [*QKV, QKV[0], a(2, 3, 4, 6)], QKV, D_PLAIN, r"a cotangent of the type of q"),
    ("attention_backward", [*QKV, QKV[0], QKV[0]], [*QKV[:2], a(7, 2, 6)], D_PLAIN, OF_TYPES + r"\(7, 2, 6\) for"),
    (
        "attention_backward",
        [*QKV, QKV[0], QKV[0]],
        [*QKV, QKV[0]],
        D_PLAIN,
        r"3 results, one for each operand in the mask",
    ),
    (
        "attention_backward",
        [*QKV, *MORE, QKV[0], QKV[0]],
        QKV,
        needs(SLOTS, (0, 1, 2, 3), **ATTENTION),
        r"4 results, one for each operand in the mask `needs_grad`; got 3",
    ),
    ("attention_backward", [*QKV, *MORE, QKV[0], QKV[0]], [a(1, 4)], needs(SLOTS, (3,), **ATTENTION), OF_TYPES),
    (
        "attention_backward",
        [*QKV, *MORE, QKV[0], QKV[0]],
        MORE[2],
        needs(SLOTS, (10,), **ATTENTION),
        r"needs_grad to be a mask of operands of floating type; got 1024",
    ),
    (
        "attention_backward",
        [*QKV, QKV[0], QKV[0]],
        MORE[0],
        needs((0, 1, 2), (3,), **ATTENTION),
        r"operands that are present",
    ),
    ("attention_backward", [*QKV, QKV[0]], QKV, D_PLAIN, r"5 operands, 3 of them in the mask `present`; got 4"),
    ("decode_attention", [a(5), a(7, 2, 5), a(7, 2, 5), i32()], a(5), DECODING, r"q with at least 2 axes"),
    ("decode_attention", [a(4, 5), a(2, 5), a(2, 5), i32()], a(4, 5), DECODING, r"k with at least 3 axes"),
    (
        "decode_attention",
        [a(4, 5), a(7, 2, 5), a(7, 2, 5), i32()],
        a(4, 6),
        DECODING,
        r"a result of the shape and dtype of q",
    ),
    ("decode_attention", [a(4, 5), a(7, 3, 5), a(7, 3, 5), i32()], a(4, 5), DECODING, HEADS + " 4 and 3"),
    ("decode_attention", [a(4, 5), a(7, 2, 6), a(7, 2, 6), i32()], a(4, 5), DECODING, r"heads of one size in q and k"),
    ("decode_attention", [a(4, 5), a(7, 2, 5), a(7, 2, 5), a()], a(4, 5), DECODING, r"length of int32"),
    (
        "decode_attention",
        [a(4, 5), a(7, 2, 5), a(7, 2, 5), i32(2)],
        a(4, 5),
        DECODING,
        r"k, v and length with the batch axes",
    ),
    (
        "decode_attention",
        [a(2, 4, 5), a(7, 2, 5), a(7, 2, 5), i32(3)],
        a(2, 4, 5),
        DECODING,
        r"with the batch axes of q",
    ),
    *[
        (
            "decode_attention",
            [a(4, 5), k, k, i32(), k_scale, v_scale],
            a(4, 5),
            present(0, 1, 2, 3, 5, 6, **DECODE),
            message,
        )
        for k, k_scale, v_scale, message in (
            (a(7, 2, 5), a(7, 2), a(7, 2), r"k of int8"),
            (i8(7, 2, 5), a(7), a(7), r"k_scale with at least 2 axes; got the shape \(7\)"),
            (i8(7, 2, 5), a(7, 2), a(2, 7), r"scales of the shape of k without its last axis; got \(2, 7\)"),
            (i8(7, 2, 5), a(2, 7, 2), a(7, 2), r"k_scale with the batch axes of q, or 1"),
            (i8(7, 2, 5), i8(7, 2), a(7, 2), r"k_scale of float32"),
            (i8(7, 2, 5), a(7, 2), i32(7, 2), r"v_scale of float32"),
        )
    ],
    *[
        (
            "decode_attention",
            [a(4, 5), *QKV[1:], i32(), slopes],
            a(4, 5),
            present(0, 1, 2, 3, 4, **{**DECODE, **more}),
            message,
        )
        for slopes, more, message in (
            (a(3), {}, r"a slope for each head; got the shape \(3\)"),
            (a(2, 4), {}, r"slopes with the batch axes of q, or 1"),
            (i32(4), {}, r"slopes of float32"),
            (a(4), {"window": np.int64(-1)}, r"a window and a soft_cap of 0 or more"),
            (a(4), {"soft_cap": np.float64(-1)}, r"a window and a soft_cap of 0 or more"),
        )
    ],
    (
        "decode_attention",
        [a(4, 5), *QKV[1:], i32(), a(7, 2)],
        a(4, 5),
        present(0, 1, 2, 3, 5, **DECODE),
        r"scales of k and of v, or none",
    ),
    ("decode_attention", [a(4, 5), i8(7, 2, 5), i8(7, 2, 5), i32()], a(4, 5), DECODING, r"q and k of one dtype"),
    ("decode_attention", [a(4, 5), *QKV[1:]], a(4, 5), WITHOUT_LENGTH, r"length to be present; got the mask 7"),
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
    ("quantized_linear", [a(32), u8(3, 34)], a(3), {**Q8, "encoding": "Q4_0"}, r"the encoding Q4_1 or Q8_0; got Q4_0"),
    ("quantized_linear", [a(32), u8(3, 34)], a(3), {**Q8, "encoding": ""}, r"the encoding Q4_1 or Q8_0; got \."),
    ("quantized_linear", [a(32), u8(3, 34)], a(3), {**Q8, "activations": ""}, r"the activations exact or int8; got \."),
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
    *[wrong for family in FAMILIES.values() for wrong in getattr(family, "NOT_HANDLED", ())],
]


@pytest.mark.parametrize(("op", "args", "result", "attributes", "message"), WRONG)
def test_refused(op, args, result, attributes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"INVALID_ARGUMENT: {op}\[native\]: ") as error:
        call(op, args, result, attributes)
    error.match(message)


@pytest.mark.parametrize("case", GOOD)
def test_wrong_numbers_of_operands_and_results(case):
    op, (args, result, attributes) = symbol_of(case), GOOD[case]
    results = result if isinstance(result, list) else [result]
    for wrong_args, wrong_result in (
        (args[:-1], result),
        ([*args, a(1)], result),
        (args, []),
        (args, [*results, results[0]]),
    ):
        with pytest.raises(
            jax.errors.JaxRuntimeError,
            match=r"operands, \d of them in the mask|results, one for each operand|[Ww]rong number of",
        ):
            call(op, wrong_args, wrong_result, attributes)


@pytest.mark.parametrize("case", [case for case, (_, _, attributes) in GOOD.items() if attributes])
def test_wrong_attributes(case):
    op, (args, result, attributes) = symbol_of(case), GOOD[case]
    for name, value in attributes.items():
        for wrong in (
            {},
            {key: value for key, value in attributes.items() if key != name},
            {**attributes, "other": np.int64(1)},
            {**attributes, name: np.float32(1)},
            {**attributes, name: np.arange(3, dtype=np.float32)},
            {**attributes, name: np.int64(1) if isinstance(value, str) else "1"},
        ):
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"attribute|data type|[Aa]ttr"):
                call(op, args, result, wrong)


def test_the_process_is_well_afterwards():
    with pytest.raises(jax.errors.JaxRuntimeError, match="norm"):
        call("norm", [a(2, 3)], a(2, 4), X)
    assert jnp.zeros(3).sum() == 0
    test_accepted("norm")
