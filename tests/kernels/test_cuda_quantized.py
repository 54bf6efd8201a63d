"""Products with weights in blocks, on a CPU."""

from typing import Any

import numpy as np
import pytest

from eqxcallback import ops
from eqxcallback.ops.linear import _reference_quantized as reference

from ..ops.linear import cases
from ..ops.table import DTYPES, with_options
from . import kernels
from .checking import ROWS, SEEDS, check, want
from .kernels import BF16, F32, results


by_encoding = pytest.mark.parametrize("encoding", [*cases.ENCODINGS, *cases.UNPACKED])


def example(shape, encoding, dtype: Any = F32) -> Any:
    rows, in_features, out_features = shape
    return cases.quantized_linear(dtype, encoding, (rows,), in_features, out_features).args


def weights_of(encoding):
    """Return how many weights a block has."""
    return cases.UNPACKED[encoding][0] if encoding in cases.UNPACKED else 32


# Where the digits of a block are.
DIGITS = {
    **dict.fromkeys(("Q4_0", "Q5_0"), slice(2, None)),
    **dict.fromkeys(("Q4_1", "Q5_1"), slice(4, None)),
    **dict.fromkeys(("Q4_K", "Q5_K"), slice(16, None)),
    "Q6_K": slice(192),
}


def with_digits(weights, encoding, fill):
    """The weights, all of whose digits have these bits."""
    blocks = weights.reshape(len(weights), -1, ops.ENCODINGS[encoding]).copy()
    blocks[..., DIGITS[encoding]] = fill
    return np.asarray(reference.dequantize(blocks.reshape(weights.shape), encoding=encoding), np.float64)


def exact_enough(got, x, weights, encoding):
    """By the sizes of what is added up: a Q4_1 weight is d * q + m, and its digits are multiplied as 16 + q."""
    exact = np.asarray(reference.dequantize(weights, encoding=encoding), np.float64)
    largest = np.abs(exact)
    if encoding in DIGITS:
        least, most = (with_digits(weights, encoding, fill) for fill in (0, 0xFF))
        largest = 32 / 15 * np.abs(most - least) + np.abs(least)
    error = np.abs(np.asarray(got, np.float64) - np.asarray(x, np.float64) @ exact.T)
    assert (error <= 3e-7 * (np.abs(np.asarray(x, np.float64)) @ largest.T)).all()


@pytest.mark.parametrize("row", ROWS["quantized_linear"], ids=str)
def test_values(row):
    encoding = row.arguments[0]
    for dtype in DTYPES:
        case, expected = row.wanted(dtype)
        x, weights = case.args
        for tiled in (False, True) if x.shape[1] < 1000 and len(x) < 60 else (len(x) > 8,):
            (got,) = results(kernels.quantized_linear(x, weights, encoding=encoding, tiled=tiled))
            check(got, expected, case.terms, scale=4.0)
            if dtype == F32:
                exact_enough(got, x, weights, encoding)


@by_encoding
@pytest.mark.parametrize("shape", [(0, 64, 3), (3, 0, 3), (20, 0, 3), (3, 64, 0), (20, 64, 0)], ids=str)
def test_nothing_to_multiply(shape, encoding):
    shape = shape[0], shape[1] // 64 * 2 * weights_of(encoding), shape[2]
    (got,) = results(kernels.quantized_linear(*example(shape, encoding), encoding=encoding))
    np.testing.assert_array_equal(got, np.zeros((shape[0], shape[2])))


@by_encoding
def test_the_order_of_threads_does_not_matter(encoding):
    for rows in (3, 20):
        features = 33 * 32 if weights_of(encoding) == 32 else 5 * 256
        call = kernels.quantized_linear(*example((rows, features, 9), encoding, BF16), encoding=encoding)
        assert len({results(call, seed)[0].tobytes() for seed in SEEDS}) == 1


@by_encoding
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [1, 12])
def test_not_finite(rows, value, encoding):
    x, weights = example((rows, 2 * weights_of(encoding), 11), encoding)
    x[0, 40] = value
    parts = weights.reshape(11, 2, -1)
    at = cases.UNPACKED[encoding][2] if encoding in cases.UNPACKED else 0
    parts[4, 1, at : at + 2] = np.array([value], np.float16).view(np.uint8)
    got, expected = (
        results(kernels.quantized_linear(x, weights, encoding=encoding))[0],
        want(with_options(reference.quantized_linear, encoding=encoding), x, weights),
    )
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=1e-5, atol=1e-5)


@by_encoding
@pytest.mark.parametrize("exponent", [-80, 0, 100])
@pytest.mark.parametrize("rows", [3, 9])
def test_as_exact_for_small_and_large_numbers(rows, exponent, encoding):
    x, weights = example((rows, 3 * weights_of(encoding), 13), encoding)
    x = np.ldexp(x, exponent)
    exact_enough(results(kernels.quantized_linear(x, weights, encoding=encoding))[0], x, weights, encoding)


@by_encoding
def test_extreme_digits_and_subnormal_scales(encoding):
    _, _, at, halves = cases.UNPACKED.get(encoding, (32, 0, 0, 2 if encoding == "Q4_1" else 1))
    for fill in (0x00, 0xFF, 0x80, 0x7F):
        weights = np.full((5, 2, ops.ENCODINGS[encoding]), fill, np.uint8)
        for bits in (0x3C00, 0x0001, 0x83FF):
            weights[..., at : at + 2 * halves] = np.full(halves, bits, np.uint16).view(np.uint8)
            flat, x = weights.reshape(5, -1), np.ones((3, 2 * weights_of(encoding)), np.float32)
            exact_enough(results(kernels.quantized_linear(x, flat, encoding=encoding))[0], x, flat, encoding)
