"""RMS norm of a sum, forward and backward, on a CPU."""

from typing import Any

import numpy as np
import pytest

from ..ops.norm.cases import add_rms_norm
from ..ops.table import DTYPES, normal
from . import kernels
from .checking import ROWS, SEEDS, check, want_gradients
from .kernels import F32, results


by_row = pytest.mark.parametrize("row", ROWS["add_rms_norm"], ids=str)


def example(shape, dtype, weight=True) -> Any:
    """`x, residual, weight`, and the case of them."""
    case = add_rms_norm(dtype, shape, weight)
    return (*case.args, None)[:3], case


def forward(args, **options):
    out, total = results(kernels.add_norm(*args), **options)
    return np.concatenate([out, total], axis=-1)


def backward(args, case, cotangents, *, needed: Any = kernels.ALL, **options):
    """Checks each gradient. The kernel reads neither the operands of the sum nor the norm, but the sum."""
    total = (args[0] + args[1]).astype(args[0].dtype)
    nothing = np.full_like(total, np.nan)
    call = kernels.add_norm_backward((nothing, nothing, args[2]), (nothing, total), cotangents, needed=needed)
    expected = want_gradients(case.reference, np.concatenate(cotangents, axis=-1), *case.args)
    for i, gradient in enumerate(results(call, **options)):
        if i >= len(expected) or i not in needed:
            assert gradient is None
        else:
            check(gradient, expected[i], sum(args[0].shape), scale=16.0)


def cotangents_of(shape, dtype):
    return normal(8, shape, dtype), normal(9, shape, dtype)


@by_row
def test_forward(row):
    for dtype in DTYPES:
        case, expected = row.wanted(dtype)
        check(forward((*case.args, None)[:3], seed=3), expected, case.terms)


@by_row
def test_backward(row):
    for dtype in DTYPES:
        case = row(dtype)
        shape = case.args[0].shape
        if shape != (1, 1):  # of which the reference's gradient is the difference of two equal numbers
            backward((*case.args, None)[:3], case, cotangents_of(shape, dtype))


def test_the_sum_is_that_of_the_dtype():
    for dtype in DTYPES:
        (x, residual, _), _ = example((3, 41), dtype)
        _, total = results(kernels.add_norm(x, residual, None))
        assert total.tobytes() == (x + residual).astype(dtype).tobytes()


@pytest.mark.parametrize("needed", [[0], [1], [2], [0, 1], [0, 2], [1, 2]], ids=str)
def test_gradients_that_are_not_needed(needed):
    args, case = example((19, 40), F32)
    for options in ({}, {"misaligned": True}):
        backward(args, case, cotangents_of((19, 40), F32), needed=needed, **options)


def test_any_alignment():
    for dtype in DTYPES:
        args, case = example((9, 264), dtype)
        check(forward(args, misaligned=True), case.want(), 264)
        backward(args, case, cotangents_of((9, 264), dtype), misaligned=True)


@pytest.mark.parametrize("factor", [2.0**63, 2.0**66, 2.0**124])
def test_rows_whose_squares_overflow(factor):
    """Their norm is that of the small row, and its derivative is inverse to their size."""
    (x, residual, weight), case = example((3, 257), F32)
    factors = np.array([[1.0], [factor], [factor]], np.float32)
    large = x * factors, residual * factors, weight
    out, total = np.split(forward(large), 2, axis=-1)
    check(out, np.split(case.want(), 2, axis=-1)[0], 257)
    np.testing.assert_array_equal(total, (x + residual) * factors)
    dout, zeros = normal(8, x.shape), np.zeros_like(x)
    dx, dresidual, dweight = results(kernels.add_norm_backward(large, (out, total), (dout, zeros)))
    expected = want_gradients(case.reference, np.concatenate([dout, zeros], axis=-1), x, residual, weight)
    for got, exact in zip((dx * factors, dresidual * factors, dweight), expected, strict=True):
        check(got, exact, 260, scale=16.0)


def test_the_order_of_threads_does_not_matter():
    args, _ = example((7, 1000), F32)
    for call in (kernels.add_norm(*args), kernels.add_norm_backward(args, args[:2], args[:2])):
        first, *others = ([x.tobytes() for x in results(call, seed)] for seed in SEEDS)
        for other in others:
            assert first == other


def test_no_rows():
    args, _ = example((0, 40), F32)
    assert forward(args).shape == (0, 80)
    dx, dresidual, dweight = results(kernels.add_norm_backward(args, args[:2], args[:2]))
    assert dx.shape == dresidual.shape == (0, 40)
    np.testing.assert_array_equal(dweight, np.zeros(40))


def test_values_at_the_edges():
    args, case = example((5, 40), F32)
    args[0][1], args[1][1] = 1, -1
    args[0][2, 3], args[0][3, 5], args[1][4, 39] = np.nan, np.inf, -np.inf
    check(forward(args), case.want(), 40)
