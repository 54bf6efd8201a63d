"""Products with weights in blocks that end with the gate, on a CPU: the bits of the two kernels."""

from typing import Any

import numpy as np
import pytest

from ..ops.linear.cases import quantized_linear_swiglu
from ..ops.table import DTYPES
from . import kernels
from .checking import ROWS, SEEDS, check
from .kernels import BF16, F32, results


by_encoding = pytest.mark.parametrize("encoding", ["Q4_1", "Q8_0"])


def example(shape, encoding, dtype: Any = F32) -> Any:
    rows, in_features, out_features = shape
    return quantized_linear_swiglu(dtype, encoding, (rows,), in_features, out_features).args


def of_one(x: Any, weights: Any, encoding: str) -> Any:
    return results(kernels.quantized_linear_swiglu(x, weights, encoding=encoding))[0]


def of_two(x: Any, weights: Any, encoding: str) -> Any:
    (both,) = results(kernels.quantized_linear(x, weights, encoding=encoding))
    return results(kernels.glu(both, activation="silu"))[0]


@pytest.mark.parametrize("row", ROWS["quantized_linear_swiglu"], ids=str)
def test_bits_of_two_kernels(row):
    encoding = row.arguments[0]
    for dtype in DTYPES:
        case, expected = row.wanted(dtype)
        x, weights = case.args
        got = of_one(x, weights, encoding)
        assert got.tobytes() == of_two(x, weights, encoding).tobytes()
        check(got, expected, case.terms)


@by_encoding
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_that_are_not_finite_or_extreme(dtype, encoding):
    """One of each sign in each row, as every output is a multiple of the only x that is not zero."""
    extremes = [np.nan, np.inf, 3e4, 88.8, 104, 1000, 0.0, 2.0**-24]
    x, weights = example((len(extremes), 64, 8), encoding, dtype)
    x[...] = 0
    x[:, 5] = extremes
    with np.errstate(invalid="ignore"):
        got, want = of_one(x, weights, encoding).astype(np.float32), of_two(x, weights, encoding).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.isfinite(got).any(1), np.isfinite(np.asarray(extremes)))


@by_encoding
def test_the_order_of_threads_does_not_matter(encoding):
    call = kernels.quantized_linear_swiglu(*example((3, 1056, 9), encoding, BF16), encoding=encoding)
    assert len({results(call, seed)[0].tobytes() for seed in SEEDS}) == 1


@by_encoding
@pytest.mark.parametrize("shape", [(0, 64, 3), (2, 0, 3), (2, 64, 0)], ids=str)
def test_nothing_to_multiply(shape, encoding):
    x, weights = example(shape, encoding)
    np.testing.assert_array_equal(of_one(x, weights, encoding), np.zeros((shape[0], shape[2])))
