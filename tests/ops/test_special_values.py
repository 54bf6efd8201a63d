"""What is not finite, what is too large or too small, and what nobody sees, on every instruction set."""

from typing import Any

import jax
import numpy as np
import pytest

from eqxcallback import ops

from . import cases
from .cases import DTYPES, attention, decode_attention, normal, quantized_linear, rms_norm, swiglu


by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_encoding = pytest.mark.parametrize("encoding", ops.ENCODINGS)

# The smallest normal number: results below it may be zero, for XLA flushes them on some threads.
TINY = np.finfo(np.float32).tiny


def same(case, got, strict=True, **tolerance: Any):
    """NaN, inf and -inf where the definition has them, and its values elsewhere. If not `strict`, NaN may stand for inf."""
    got, want = np.asarray(got, np.float32), case.want()
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    if strict:
        np.testing.assert_array_equal(got[~finite], want[~finite])
    np.testing.assert_allclose(got[finite], want[finite], **tolerance)


def fitting(value, dtype):
    """The finite number next to `value`."""
    return float(np.clip(value, -65504, 65504)) if dtype == np.float16 else value


def replaced(case, operand, index, value):
    args = [np.array(x) for x in case.args]
    args[operand][index] = value
    return cases.Case(case.op, case.definition, tuple(args), case.terms)


@by_dtype
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 16, 33])
def test_not_finite_goes_through_elementwise(value, size, dtype, isa):
    tolerance: Any = {"rtol": max(cases.ROUNDING[dtype], 2e-6)}
    for make, operands in (
        (lambda: rms_norm(dtype, (3, size)), (0, 1)),
        (lambda: swiglu(dtype, (3, size)), (0, 1)),
        (lambda: cases.rotary_embedding(dtype, (3, 2, 2 * size)), (0, 1, 2)),
    ):
        for operand in operands:
            case = make()
            case = replaced(case, operand, (..., -1) if operand else (1, ..., size // 2), value)
            same(case, case.op(*case.args), atol=1e-6, **tolerance)


@by_dtype
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", [0, 1, 2])
@pytest.mark.parametrize("position", [0, 5, 16])
def test_not_finite_goes_through_attention(value, operand, position, dtype, isa):
    """The weight of a key that does not count may meet a value that is infinite: hence NaN for inf."""
    for case in (
        attention(dtype, (), 17, 17, 2, 1, 9, causal=False),
        decode_attention(dtype, (17,), 17, 2, 1, 9, lengths=17),
    ):
        index = (position, 0, 0) if operand == 0 or case.args[1].ndim == 3 else (slice(None), position, 0, 0)
        case = replaced(case, operand, index, value)
        same(case, case.op(*case.args), strict=False, rtol=max(cases.ROUNDING[dtype], 2e-5), atol=1e-5)


@by_dtype
def test_what_is_masked_is_not_read(dtype, isa):
    """NaN beyond the diagonal, or beyond the length, is nobody's. (The definition multiplies it by zero.)"""
    case = attention(dtype, (), 70, 70, 2, 1, 9, causal=True)
    want = case.want()
    poisoned = replaced(replaced(case, 1, slice(65, None), np.nan), 2, slice(65, None), np.nan)
    got = np.asarray(case.op(*poisoned.args), np.float32)
    assert np.isnan(got[65:]).all()
    cases.tolerate(got[:64].astype(dtype), want[:64], case.terms)

    case = decode_attention(dtype, (3,), 40, 2, 1, 9, lengths=[0, 17, 33])
    poisoned = case
    for example, length in enumerate([0, 17, 33]):
        for operand in (1, 2):
            poisoned = replaced(poisoned, operand, (example, slice(length, None)), np.nan)
    case.check(case.op(*poisoned.args))


@by_dtype
@by_encoding
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("position", [0, 31, 40, 63])
def test_not_finite_goes_through_quantized_linear(value, position, batch, encoding, dtype, isa):
    """A Q4_1 weight is a sum, and so is its product with one row: inf and -inf make NaN."""
    case = quantized_linear(dtype, encoding, batch, 64, 11)
    case = replaced(case, 0, (..., position), value)
    same(case, case.op(*case.args), strict=False, rtol=max(cases.ROUNDING[dtype], 1e-5), atol=1e-5)


@by_encoding
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_scale_that_is_not_finite(value, batch, encoding, isa):
    """No row of weights spoils another one."""
    case = quantized_linear(DTYPES[0], encoding, batch, 64, 11)
    blocks = np.array(case.args[1])
    blocks[4, :2] = np.array([value], np.float16).view(np.uint8)
    got = np.asarray(case.op(case.args[0], blocks))
    want = case.want()
    assert not np.isfinite(got[..., 4]).any()
    others = np.arange(11) != 4
    np.testing.assert_allclose(got[..., others], want[..., others], atol=1e-5)


def exact_enough(case, encoding, got):
    """By the sizes of what is added up."""
    x, blocks = np.asarray(case.args[0], np.float64), case.args[1]
    weights = np.asarray(ops.dequantize(blocks, encoding=encoding), np.float64)
    largest = weights
    if encoding == "Q4_1":  # all scales and minimums are positive: nothing cancels
        parts: Any = np.array(blocks).reshape(*blocks.shape[:1], -1, 20)
        parts[..., [1, 3]] &= 127
        largest = np.asarray(ops.dequantize(parts.reshape(blocks.shape), encoding=encoding), np.float64)
    assert np.all(np.abs(np.asarray(got, np.float64) - x @ weights.T) <= 1e-6 * (np.abs(x) @ np.abs(largest).T))


@by_encoding
@pytest.mark.parametrize("exponent", [-80, -50, 0, 50, 100])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_quantized_linear_is_as_exact_for_small_and_large_numbers(exponent, batch, encoding, isa):
    case = quantized_linear(DTYPES[0], encoding, batch, 96, 13)
    case = cases.Case(case.op, case.definition, (np.ldexp(case.args[0], exponent), case.args[1]), 96)
    exact_enough(case, encoding, case.op(*case.args))


@by_encoding
def test_quantized_linear_with_scales_that_are_subnormal(encoding, isa):
    """f16 below 6e-5 has another encoding."""
    for batch in ((), (3,)):
        case = quantized_linear(DTYPES[0], encoding, batch, 64, 11)
        parts = np.array(case.args[1]).reshape(11, 2, -1)
        count = 4 if encoding == "Q4_1" else 2
        bits = np.random.default_rng(0).integers(1, 1024, (11, 2, count // 2)).astype(np.uint16)
        parts[..., :count] = bits.view(np.uint8)
        case = cases.Case(case.op, case.definition, (case.args[0], parts.reshape(11, -1)), 64)
        want = case.want()
        np.testing.assert_allclose(case.op(*case.args), want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


@by_encoding
@pytest.mark.parametrize("batch", [(), (3,)])
def test_one_element_much_larger_than_the_others(batch, encoding, isa):
    """In another block, it takes no digits from them."""
    case = quantized_linear(DTYPES[0], encoding, batch, 64, 11)
    x = np.array(case.args[0])
    x[..., :32] *= 1e-20
    x[..., 0] = 0
    case = cases.Case(case.op, case.definition, (x, np.array(case.args[1])), 64)
    case.args[1][:, case.args[1].shape[1] // 2 :] = 0  # the weights of the second block
    exact_enough(case, encoding, case.op(*case.args))


@by_dtype
@pytest.mark.parametrize("size", [1e4, -1e4, 1e15])
def test_large_logits(size, dtype, isa):
    """The softmax of one that is far above the others is a choice: no overflow, and no zero."""
    for case in (attention(dtype, (), 5, 140, 2, 1, 8), decode_attention(dtype, (5,), 140, 2, 1, 8, lengths=140)):
        args = list(case.args)
        args[0] = np.full_like(args[0], fitting(size, dtype))
        args[1] = np.ones_like(args[1])
        args[1][..., 77, :, :] = 2 if size > 0 else 0.5
        chosen = np.broadcast_to(args[2][..., 77, :, :], args[0].shape)
        np.testing.assert_array_equal(case.op(*args), chosen)


@by_dtype
def test_all_logits_are_very_low(dtype, isa):
    """Their difference counts, not where they lie."""
    for case in (attention(dtype, (), 5, 20, 2, 1, 8), decode_attention(dtype, (5,), 20, 2, 1, 8, lengths=20)):
        args = [
            np.full_like(case.args[0], fitting(1e17, dtype)),
            np.full_like(case.args[1], fitting(-1e17, dtype)),
            *case.args[2:],
        ]
        want = np.broadcast_to(case.args[2].astype(np.float32).mean(axis=-3, keepdims=True), case.args[2].shape)
        got = np.asarray(case.op(*args), np.float32)
        np.testing.assert_allclose(
            got, np.broadcast_to(want[..., :1, :, :].squeeze(-3), got.shape), rtol=2.0**-8, atol=1e-6
        )


@by_dtype
def test_large_and_small_numbers_elementwise(dtype, isa):
    numbers = [1e-38, 1e-20, 1e-3, 80, -80, 90, -90, 100, -100, 3e4, -3e4, 3e38, -3e38, 0, -0.0]
    x = np.array([fitting(number, dtype) for number in numbers], dtype)
    tiny: Any = {} if dtype == np.float16 else {"x": np.array([[1e-30, 1e-25, -3e-28]], dtype)}
    for case in (
        cases.Case(ops.swiglu, swiglu(dtype, (1,)).definition, (x, np.ones_like(x)), 1),
        rms_norm(dtype, (1, 15), x=x[None]),
        rms_norm(dtype, (15, 1), x=x[:, None]),
        rms_norm(dtype, (1, 3), **tiny, eps=0.0),
    ):
        with np.errstate(over="ignore"):
            atol = 2.0**-24 if dtype == np.float16 else TINY
            same(case, case.op(*case.args), rtol=max(cases.ROUNDING[dtype], 2e-6), atol=atol)


@by_dtype
def test_subnormal_operands(dtype, isa):
    x = np.full((3, 17), 1e-40).astype(dtype)
    for case in (
        cases.Case(ops.swiglu, swiglu(dtype, (1,)).definition, (x, normal(1, x.shape, dtype)), 1),
        rms_norm(dtype, x.shape, x=x),
    ):
        same(case, case.op(*case.args), atol=2 * TINY)


ROUNDED = {
    DTYPES[1]: [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -(1 + 2.0**-8), 3.4e38],
    # The smallest normal number, subnormal ones, and the edges of what becomes zero or infinite.
    DTYPES[2]: [
        *[1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 + 2.0**-20, -(1 + 2.0**-11), 65519.99, 65520, -1e5, 3e38],
        *[2.0**-14, 2.0**-14 - 2.0**-25, 3 * 2.0**-25, -(2.0**-24), 2.0**-25, 2.0**-25 + 2.0**-40, 1e-30],
    ],
}


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(dtype, value) for dtype, values in ROUNDED.items() for value in (0.0, -0.0, 1.0, np.nan, np.inf, *values)],
)
def test_rounded_to_the_nearest_even(dtype, value, isa):
    """By a whole vector, and by its rest. A NaN stays one, whatever its bits."""
    gate: Any = np.full((1, 37), 100.0, dtype)  # silu(100) is 100
    up: Any = np.full((1, 37), 1.0, dtype)
    weight: Any = np.full(37, value, np.float32)
    got = np.asarray(ops.rms_norm(up, weight, eps=0.0))
    with np.errstate(over="ignore"):
        want = np.full((1, 37), np.float32(value)).astype(dtype)
    assert np.array_equal(got.view(np.uint16), want.view(np.uint16)) or np.isnan(value)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    np.testing.assert_array_equal(ops.swiglu(gate, up), gate)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_nan_of_any_bits_stays_one(dtype, isa):
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7FC00000] * 8, np.uint32)
    got = np.asarray(jax.jit(ops.rms_norm)(np.ones((1, 40), dtype), bits.view(np.float32)))
    assert np.isnan(got.astype(np.float32)).all()


def test_every_f16_is_read_as_it_is(isa):
    x: Any = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(-1, 1)
    got = np.asarray(ops.swiglu(np.full_like(x, 100), x))
    with np.errstate(over="ignore", invalid="ignore"):
        want = (np.float32(100) * x.astype(np.float32)).astype(np.float16)
    np.testing.assert_array_equal(got, want)
