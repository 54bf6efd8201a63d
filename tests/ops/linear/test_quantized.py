"""Products with weights in blocks: any shape, memory, and what is not finite, too large or too small."""

from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from eqxcallback import _ext, ops
from eqxcallback.ops.linear import _reference_quantized as reference_quantized

from .. import table
from ..special_values import replaced, same
from ..table import DTYPES, row
from . import cases
from .cases import quantized_linear


pytestmark = pytest.mark.any_jax_version

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_encoding = pytest.mark.parametrize("encoding", cases.ENCODINGS)
by_isa = pytest.mark.usefixtures("isa")


few = hypothesis.settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


@few
@hypothesis.given(
    strategies.sampled_from(list(cases.ENCODINGS)),
    strategies.integers(0, 40),
    strategies.integers(0, 9),
    strategies.integers(0, 70),
    strategies.sampled_from(DTYPES),
)
def test_quantized_linear_of_any_shape(isa, encoding, rows, in_blocks, out_features, dtype):
    case, want = row(quantized_linear, encoding, (rows,), 32 * in_blocks, out_features, tags=()).wanted(dtype)
    case.check(case.op(*case.args), want)


def test_dequantize():
    scale, minimum = np.float16(0.5), np.float16(-3)
    digits = np.arange(16, dtype=np.uint8) | (np.arange(16, dtype=np.uint8)[::-1] << 4)
    block: Any = np.concatenate([np.array([scale, minimum]).view(np.uint8), digits])
    want = 0.5 * np.concatenate([np.arange(16), np.arange(16)[::-1]]) - 3
    np.testing.assert_array_equal(ops.dequantize(block, encoding="Q4_1"), want)
    values = np.arange(-128, 128, 8, dtype=np.int8)
    block = np.concatenate([np.array([scale]).view(np.uint8), values.view(np.uint8)])
    np.testing.assert_array_equal(ops.dequantize(block[None], encoding="Q8_0"), 0.5 * values[None].astype(np.float32))
    for encoding, size in cases.ENCODINGS.items():
        assert ops.dequantize(jnp.zeros((2, 0, 3 * size), jnp.uint8), encoding=encoding).shape == (2, 0, 96)


@by_dtype
@by_encoding
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("position", [0, 31, 40, 63])
def test_not_finite_goes_through_quantized_linear(value, position, batch, encoding, dtype, isa):
    """A Q4_1 weight is a sum, and so is its product with one row: inf and -inf make NaN."""
    case = quantized_linear(dtype, encoding, batch, 64, 11)
    case = replaced(case, 0, (..., position), value)
    same(case, case.op(*case.args), strict=False, rtol=max(table.ROUNDING[dtype], 1e-5), atol=1e-5)


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
    case = table.Case(case.op, case.reference, (np.ldexp(case.args[0], exponent), case.args[1]), 96)
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
        case = table.Case(case.op, case.reference, (case.args[0], parts.reshape(11, -1)), 64)
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
    case = table.Case(case.op, case.reference, (x, np.array(case.args[1])), 64)
    case.args[1][:, case.args[1].shape[1] // 2 :] = 0  # the weights of the second block
    exact_enough(case, encoding, case.op(*case.args))


@by_encoding
@pytest.mark.parametrize(("activations", "rows"), [("exact", 2), ("exact", 3), ("int8", 2), ("int8", 4)])
@pytest.mark.parametrize("value", [None, np.nan, 3e38])
def test_each_of_few_rows_gets_what_it_gets_alone(value, rows, activations, encoding, isa):
    """Bit by bit, also beside a row that has no form in bytes."""
    if activations == "int8" and not {"avx512", "neon_dot", "neon_bf16"} & set(isa.split()):
        rows = 1  # where bytes are not multiplied, several rows are a product of matrices
    weights = cases.blocks(2, 21, 96, encoding)
    x = np.array(table.normal(1, (rows, 96)))
    if value is not None:
        x[-1, 40] = value
    product = table.quickly_compiled(
        table.with_options(ops.quantized_linear, encoding=encoding, activations=activations)
    )
    np.testing.assert_array_equal(product(x, weights), [product(row, weights) for row in x])


@by_encoding
@pytest.mark.parametrize("rows", [7, 9, 12])
def test_each_of_many_rows_gets_what_it_gets_among_more(rows, encoding, isa):
    if rows <= 8 and "avx512" not in isa:
        pytest.skip("other tables give up to 8 rows what these get alone")
    weights, x = cases.blocks(2, 21, 96, encoding), table.normal(1, (17, 96))
    product = table.quickly_compiled(table.with_options(ops.quantized_linear, encoding=encoding))
    np.testing.assert_array_equal(product(x[:rows], weights), product(x, weights)[:rows])


@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("encoding", ["int8", *cases.ENCODINGS])
@pytest.mark.parametrize("value", [np.nan, 3e38])
def test_no_row_changes_what_many_others_get(value, encoding, activations, isa):
    """Bit by bit, if it has no form in bytes."""
    x = np.array(table.normal(1, (20, 96)))
    if encoding == "int8":
        parts = ops.quantize_int8(table.normal(2, (48, 96)))
        product = table.quickly_compiled(lambda x: ops.int8_linear(x, *parts, activations=activations))
    else:
        weights = cases.blocks(2, 48, 96, encoding)
        options: Any = {"encoding": encoding, "activations": activations}
        product = table.quickly_compiled(lambda x: ops.quantized_linear(x, weights, **options))
    want = np.asarray(product(x))
    for index in (0, 7, 19):
        changed = x.copy()
        changed[index, 40] = value
        got = np.asarray(product(changed))
        others = np.arange(20) != index
        np.testing.assert_array_equal(got[others], want[others])
        np.testing.assert_array_equal(got[index], product(changed[index]))


def blocks(encoding, rows, features, seed=0):
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, features // 32, ops.ENCODINGS[encoding]), np.uint8)
    heads = 2 if encoding == "Q4_1" else 1
    scales = rng.normal(scale=0.1, size=(rows, features // 32, heads)).astype(np.float16)
    data[..., : 2 * heads] = scales.view(np.uint8)
    return jnp.asarray(data.reshape(rows, -1))


def exact(x, weights, encoding):
    return (
        np.asarray(x, np.float64) @ np.asarray(reference_quantized.dequantize(weights, encoding=encoding), np.float64).T
    )


@by_isa
@pytest.mark.parametrize("encoding", list(cases.ENCODINGS))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_reaches_every_result(value, encoding):
    weights = blocks(encoding, 9, 64)
    product = jax.jit(table.with_options(ops.quantized_linear, encoding=encoding))
    touched = np.asarray(reference_quantized.dequantize(weights, encoding=encoding)) != 0
    for index in range(64):
        x = np.ones(64, np.float32)
        x[index] = value
        out = product(x, weights)
        assert not np.isfinite(out)[touched[:, index]].any(), index
        if np.isnan(value):
            assert np.isnan(out).all(), index


@by_isa
@pytest.mark.parametrize("encoding", list(cases.ENCODINGS))
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e30, 1e34])
def test_quantized_linear_has_one_precision_for_all_magnitudes(scale, encoding):
    weights = blocks(encoding, 40, 96)
    x = jnp.asarray(np.random.default_rng(1).normal(size=96).astype(np.float32) * np.float32(scale))
    out, expected = ops.quantized_linear(x, weights, encoding=encoding), exact(x, weights, encoding)
    magnitude = (
        np.abs(np.asarray(x, np.float64))
        @ np.abs(np.asarray(reference_quantized.dequantize(weights, encoding=encoding))).T
    )
    assert (np.abs(np.asarray(out, np.float64) - expected) <= 2e-6 * magnitude).all()


@by_isa
@pytest.mark.parametrize("encoding", list(cases.ENCODINGS))
def test_quantized_linear_near_overflow(encoding):
    weights = blocks(encoding, 40, 64)
    x = jnp.full(64, 1e36, jnp.float32).at[::2].set(-1e36)
    if "avx512" not in _ext.isa():
        x = x / 100  # there the sums of a block are not scaled: they have to fit
    np.testing.assert_allclose(
        ops.quantized_linear(x, weights, encoding=encoding), exact(x, weights, encoding), rtol=1e-4, atol=1e33
    )


@by_isa
@pytest.mark.parametrize("encoding", list(cases.ENCODINGS))
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x80, 0x7F])
def test_extreme_weights_and_activations(fill, encoding):
    heads = 4 if encoding == "Q4_1" else 2
    data = np.full((9, 2, ops.ENCODINGS[encoding]), fill, np.uint8)
    data[..., :heads] = np.asarray([1.0] * (heads // 2), np.float16).view(np.uint8)
    weights = jnp.asarray(data.reshape(9, -1))
    for top in (1.0, np.nextafter(np.float32(1), np.float32(0)), np.nextafter(np.float32(1), np.float32(2)), -1.0):
        x = jnp.full(64, top, jnp.float32)
        np.testing.assert_allclose(
            ops.quantized_linear(x, weights, encoding=encoding), exact(x, weights, encoding), rtol=1e-6
        )
