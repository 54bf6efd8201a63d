"""Softmax, forward and backward, on a CPU."""

import itertools
from typing import Any

import numpy as np
import pytest

from eqxcallback.ops.softmax import _reference as reference

from ..ops.softmax.cases import softmax
from ..ops.table import DTYPES, normal, with_options
from . import kernels
from .checking import ROWS, SEEDS, check, want, want_gradients
from .kernels import F32, results


by_row = pytest.mark.parametrize("row", ROWS["softmax"], ids=str)


def example(shape, dtype, mask_rows=None) -> Any:
    """`x`, and a mask of so many rows."""
    x, *mask = softmax(dtype, shape, None if mask_rows is None else (mask_rows, shape[-1])).args
    return x, mask[0] if mask else None


def flat(case) -> Any:
    """`x` and the mask as the kernels have them, of one axis of rows; what takes part; and the scale."""
    x, *mask = case.args
    size = x.shape[-1]
    there = np.broadcast_to(mask[0] if mask else True, x.shape).reshape(-1, size)
    return x.reshape(-1, size), mask[0].reshape(-1, size) if mask else None, there, case.op.keywords["scale"]


def backward(x, mask, out, dout, scale):
    """`x`, which is not read, is NaN."""
    return kernels.softmax_backward(np.full_like(x, np.nan), mask, np.asarray(out, x.dtype), dout, scale=scale)


def calls(dtype):
    for shape, mask_rows in itertools.product(((6, 7), (3, 264), (3, 1001)), (None, 1, 3)):
        x, mask = example(shape, dtype, mask_rows)
        yield kernels.softmax(x, mask, scale=0.5)
        yield kernels.softmax_backward(x, mask, x, x, scale=0.5)


@by_row
def test_forward(row):
    """The values that the mask hides are NaN."""
    for dtype in DTYPES:
        case, expected = row.wanted(dtype)
        x, mask, there, scale = flat(case)
        hidden = np.where(there, x, np.asarray(np.nan, dtype))
        for options in ({}, {"misaligned": True}):
            (out,) = results(kernels.softmax(hidden, mask, scale=scale), seed=3, **options)
            check(out, expected.reshape(x.shape), case.terms)
            assert (out[~there] == 0).all()


@by_row
def test_backward(row):
    """Hidden values are not read. The weights are the rounded results, divided by their sum where they weigh `dout`."""
    for dtype in DTYPES:
        case, expected = row.wanted(dtype)
        x, mask, there, scale = flat(case)
        dout = normal(3, x.shape, dtype)
        out = expected.reshape(x.shape).astype(dtype)
        weights, upstream = out.astype(np.float64), np.where(there, dout, 0).astype(np.float64)
        sums = weights.sum(-1, keepdims=True)
        gradient = scale * weights * (upstream - (weights * upstream).sum(-1, keepdims=True) / np.where(sums, sums, 1))
        hidden, nothing = np.where(there, dout, np.asarray(np.nan, dtype)), np.asarray(np.nan, dtype)
        call = backward(x, mask, np.where(there, out, nothing), hidden, scale)
        for options in ({}, {"misaligned": True}):
            got, of_mask = results(call, seed=2, **options)
            check(got, gradient, case.terms)
            assert of_mask is None


def test_the_formula_is_the_derivative():
    case = softmax(F32, (2, 3, 40), (3, 40), 0.7)
    x, mask, _, scale = flat(case)
    dout = normal(3, case.args[0].shape)
    call = backward(x, mask, want(case.reference, *case.args).reshape(x.shape), dout.reshape(x.shape), scale)
    got, _ = results(call)
    check(got, want_gradients(case.reference, dout, *case.args)[0].reshape(x.shape), 40)


def test_the_order_of_threads_does_not_matter():
    x, mask = example((5, 1001), F32, 1)
    for call in (kernels.softmax(x, mask, scale=1.0), kernels.softmax_backward(x, mask, x, x, scale=1.0)):
        assert len({results(call, seed)[0].tobytes() for seed in SEEDS}) == 1


def test_no_rows():
    x = normal(1, (0, 7))
    assert results(kernels.softmax(x, np.ones((1, 7), bool), scale=1.0))[0].shape == (0, 7)
    assert results(kernels.softmax_backward(x, None, x, x, scale=1.0))[0].shape == (0, 7)


@pytest.mark.parametrize("size", [40, 1030])
def test_values_at_the_edges(size):
    """One row each: large, as large as can be, NaN, inf, -inf, nothing but -inf; and then one of which nothing takes part."""
    x, mask = example((7, size), F32, 7)
    top = np.finfo(np.float32).max
    x[0, 7], x[1] = 1e4, -top
    x[1, :2], mask[1, :2] = top, True
    x[2, 5], x[3, 5], x[4, 5], x[5] = np.nan, np.inf, -np.inf, -np.inf
    mask[2:5, 5], mask[6] = True, False
    expected = want(with_options(reference.softmax, scale=1.0), x, mask)
    (got,) = results(kernels.softmax(x, mask, scale=1.0))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[~mask], 0)
    (got,) = results(kernels.softmax(-x[:2], None, scale=-1e3))
    assert got[0, 7] == 1
    assert (got[1, :2] == 0.5).all()
    dx, _ = results(kernels.softmax_backward(x, mask, np.where(mask, expected, 0), normal(3, x.shape), scale=1.0))
    assert (dx[~mask] == 0).all()
