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
ROWS = {"row_rank": np.int64(1)}
Q8 = {"encoding": "Q8_0"}


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


def call(op, args, result, attributes, aliases=None):
    results = result if isinstance(result, list) else [result]
    struct = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    f = jax.ffi.ffi_call(f"eqxcallback_{op}", struct, input_output_aliases=aliases, has_side_effect=True)
    return jax.block_until_ready(jax.jit(lambda *args: f(*args, **attributes))(*args))


GOOD = {
    "rms_norm": ([a(2, 3), a(3)], a(2, 3), EPS),
    "rotary_embedding": ([a(2, 3, 2, 4), a(3, 2), a(3, 2)], a(2, 3, 2, 4), {}),
    "swiglu": ([a(2, 4), a(2, 4)], a(2, 4), {}),
    "attention": ([a(2, 3, 4, 5), a(7, 2, 5), a(7, 2, 5)], a(2, 3, 4, 5), ATTENTION),
    "decode_attention": ([a(2, 4, 5), a(2, 7, 2, 5), a(2, 7, 2, 5), i32()], a(2, 4, 5), SCALE),
    "cache_append": ([a(2, 7, 3), a(2, 1, 3), i32()], a(2, 7, 3), ROWS),
    "quantized_linear": ([a(2, 32), u8(3, 34)], a(2, 3), Q8),
}


@pytest.mark.parametrize("op", GOOD)
def test_accepted(op):
    args, result, attributes = GOOD[op]
    (out,) = call(op, args, result, attributes, aliases={0: 0} if op == "cache_append" else None)
    np.testing.assert_array_equal(out, result)


def test_every_handler_is_here():
    assert set(_ext.cpu_ops()) == set(GOOD)


ROTARY = r"rotary_embedding\[native\]: expected cos and sin of shape"
HEADS = r"expected a number of query heads that is a multiple of the key/value heads; got"
WRONG = [
    ("rms_norm", [a(2, 3)], a(2, 4), EPS, r"rms_norm\[native\]: expected a result of the type of x\."),
    ("rms_norm", [a(2, 3)], a(2, 3, dtype=BF16), EPS, r"expected a result of the type of x"),
    ("rms_norm", [a()], a(), EPS, r"rms_norm\[native\]: expected x with at least 1 axes; got the shape \(\)"),
    ("rms_norm", [i32(3)], i32(3), EPS, r"rms_norm\[native\]: expected arrays of float32 or bfloat16"),
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
    ("rotary_embedding", [i32(3, 2, 4), a(3, 2), a(3, 2)], i32(3, 2, 4), {}, r"arrays of float32 or bfloat16"),
    ("swiglu", [a()], a(), {}, r"swiglu\[native\]: expected gate with at least 1 axes"),
    ("swiglu", [a(4)], a(), {}, r"swiglu\[native\]: expected the result with at least 1 axes"),
    ("swiglu", [a(2, 4)], a(2, 4), {}, r"a result that matches the operands; got \(2, 4\) for \(2, 4\)"),
    ("swiglu", [a(2, 4)], a(2), {}, r"a result that matches the operands"),
    ("swiglu", [a(2, 4)], a(3, 2), {}, r"a result that matches the operands"),
    ("swiglu", [a(2, 4), a(2, 4)], a(2, 2), {}, r"a result that matches the operands"),
    ("swiglu", [a(2, 4)], a(2, 2, dtype=BF16), {}, r"a result that matches the operands"),
    ("swiglu", [a(2, 4), a(2, 5)], a(2, 4), {}, r"gate and up of one shape and dtype; got \(2, 4\) and \(2, 5\)"),
    ("swiglu", [a(2, 4), a(2, 4, dtype=BF16)], a(2, 4), {}, r"gate and up of one shape and dtype"),
    ("swiglu", [i32(2, 4)], i32(2, 2), {}, r"arrays of float32 or bfloat16"),
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
    ("attention", [i32(3, 4, 5), i32(7, 2, 5), i32(7, 2, 5)], i32(3, 4, 5), ATTENTION, r"float32 or bfloat16"),
    ("decode_attention", [a(5), a(7, 2, 5), a(7, 2, 5), i32()], a(5), SCALE, r"q with at least 2 axes"),
    ("decode_attention", [a(4, 5), a(2, 5), a(2, 5), i32()], a(4, 5), SCALE, r"k with at least 3 axes"),
    ("decode_attention", [a(4, 5), a(7, 2, 5), a(7, 2, 5), i32()], a(4, 6), SCALE, r"a result of the shape of q"),
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
    ("quantized_linear", [i32(32), u8(3, 34)], i32(3), Q8, r"arrays of float32 or bfloat16"),
]


@pytest.mark.parametrize(("op", "args", "result", "attributes", "message"), WRONG)
def test_refused(op, args, result, attributes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"INVALID_ARGUMENT: {op}\[native\]: ") as error:
        call(op, args, result, attributes)
    error.match(message)


@pytest.mark.parametrize("op", GOOD)
def test_wrong_numbers_of_operands_and_results(op):
    args, result, attributes = GOOD[op]
    one_too_few = args[: 0 if op in ("rms_norm", "swiglu") else -1]  # their second one is optional
    for wrong_args, wrong_result in (
        (one_too_few, result),
        ([*args, a(1)], result),
        (args, []),
        (args, [result, result]),
    ):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"expected one or two operands and one result|[Ww]rong number of"
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
        {**attributes, first: np.arange(3)},
        {**attributes, first: "1" if op != "quantized_linear" else np.int64(1)},
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"attribute|data type|[Aa]ttr"):
            call(op, args, result, wrong)


def test_the_process_is_well_afterwards():
    with pytest.raises(jax.errors.JaxRuntimeError, match="rms_norm"):
        call("rms_norm", [a(2, 3)], a(2, 4), EPS)
    assert jnp.zeros(3).sum() == 0
    test_accepted("rms_norm")
