"""Group norm, forward and backward, on a CPU."""

import itertools
from typing import Any

import numpy as np
import pytest

from ..ops.norm.cases import group_norm
from ..ops.table import DTYPES, normal
from . import kernels
from .checking import ROWS, SEEDS, check, want, want_gradients
from .kernels import F32, results


by_row = pytest.mark.parametrize("row", ROWS["group_norm"], ids=str)


def parameters(case, weight=True, bias=True) -> Any:
    """`x, weight, bias`, `None` for those that the case lacks."""
    x, *given = case.args
    left = iter(given)
    return x, *(next(left) if has else None for has in (weight, bias))


def split(row):
    """The groups, and whether there are a weight and a bias."""
    _, groups, weight, bias = (*row.arguments, True, True)[:4]
    return groups, weight, bias


def backward(case, args, groups, dout, needed: Any = kernels.ALL):
    """The result is not read."""
    return kernels.group_norm_backward(args, np.full_like(args[0], np.nan), dout, groups=groups, needed=needed)


def check_gradients(case, args, got, dout, needed: Any = kernels.ALL):
    expected = iter(want_gradients(case.reference, dout, *case.args))
    for i, (arg, gradient) in enumerate(zip(args, got, strict=True)):
        exact = None if arg is None else next(expected)
        if exact is None or i not in needed:
            assert gradient is None
        else:
            check(gradient, exact, dout.size // (1 if i == 0 else dout.shape[-2]), scale=16.0)


@by_row
def test_forward(row):
    groups, *has = split(row)
    for dtype in DTYPES:
        case, expected = row.wanted(dtype)
        if case.args[0].size == 1:
            expected = case.args[2].reshape(1, 1, 1)  # the reference divides rounding errors
        got = results(kernels.group_norm(*parameters(case, *has), groups=groups), seed=3)
        check(got[0], expected, case.terms)


@by_row
def test_backward(row):
    groups, *has = split(row)
    for dtype in DTYPES:
        case = row(dtype)
        args, dout = parameters(case, *has), normal(9, case.args[0].shape, dtype)
        check_gradients(case, args, results(backward(case, args, groups, dout)), dout)


@pytest.mark.parametrize("shape", [(5, 6, 9), (2, 2, 1024)], ids=str)
def test_gradients_that_are_not_needed(shape):
    """Each set of them. Without those of parameters, there is no second launch."""
    case, dout = group_norm(F32, shape, 2), normal(9, shape)
    args = parameters(case)
    for needed in [[0], [1], [2], [0, 1], [0, 2], [1, 2]]:
        call = backward(case, args, 2, dout, needed)
        assert call.workspaces[0][0] == (sum(i > 0 for i in needed), *shape[:2])
        assert len(call.launches) == (1 if needed == [0] else 2)
        for options in ({}, {"misaligned": True}):
            check_gradients(case, args, results(call, **options), dout, needed)


def test_any_alignment():
    for dtype, shape in itertools.product(DTYPES, ((3, 4, 66), (2, 2, 1032))):
        case, dout = group_norm(dtype, shape, 2), normal(9, shape, dtype)
        args = parameters(case)
        check(results(kernels.group_norm(*args, groups=2), misaligned=True)[0], case.want(), case.terms)
        check_gradients(case, args, results(backward(case, args, 2, dout), misaligned=True), dout)


@pytest.mark.parametrize("factor", [2.0**40, 2.0**63, 2.0**66, 2.0**100, 2.0**124])
@pytest.mark.parametrize("shape", [(3, 4, 33), (3, 2, 700)], ids=str)
def test_groups_whose_squares_overflow(factor, shape):
    """Their norm is that of the small group, and its derivative is inverse to their size."""
    case, dout = group_norm(F32, shape, 2), normal(9, shape)
    factors = np.array([1.0, factor, factor], np.float32).reshape(3, 1, 1)
    x, weight, bias = parameters(case)
    large = x * factors, weight, bias
    check(results(kernels.group_norm(*large, groups=2))[0], case.want(), case.terms)
    dx, *others = results(backward(case, large, 2, dout))
    check_gradients(case, (x, weight, bias), [dx * factors, *others], dout)


def test_a_group_of_one_large_value():
    x, bias = np.full((2, 4, 35), 3e38, np.float32), normal(3, (4,))
    (got,) = results(kernels.group_norm(x, None, bias, groups=2))
    check(got, np.broadcast_to(bias[:, None], x.shape), 70)


def test_the_order_of_threads_does_not_matter():
    for shape in ((3, 4, 100), (2, 40, 7)):
        case = group_norm(F32, shape, 2)
        args = parameters(case)
        for call in (kernels.group_norm(*args, groups=2), backward(case, args, 2, args[0])):
            first, *others = ([x.tobytes() for x in results(call, seed)] for seed in SEEDS)
            for other in others:
                assert first == other


@pytest.mark.parametrize("shape", [(0, 4, 3), (3, 4, 0), (2, 0, 3)], ids=str)
def test_nothing(shape):
    case = group_norm(F32, shape, 2)
    args = parameters(case)
    assert results(kernels.group_norm(*args, groups=2))[0].shape == shape
    dx, *sums = results(backward(case, args, 2, args[0]))
    assert dx.shape == shape
    for gradient in sums:
        np.testing.assert_array_equal(gradient, np.zeros(shape[1]))


def test_values_at_the_edges():
    """A group each: zeros, a large mean, NaN, and both infinities."""
    case = group_norm(F32, (5, 4, 20), 2)
    x, weight, bias = parameters(case)
    x[0, :2], x[3, 0, 7], x[4, 0, 5], x[4, 3, 19] = 0, np.nan, np.inf, -np.inf
    got = results(kernels.group_norm(x, weight, bias, groups=2))[0]
    check(got, want(case.reference, x, weight, bias), 40)


def calls(dtype):
    for shape, groups in (((3, 6, 5), 3), ((2, 2, 520), 2), ((2, 34, 9), 1)):
        args = parameters(group_norm(dtype, shape, groups))
        yield kernels.group_norm(*args, groups=groups)
        yield kernels.group_norm(args[0], None, None, groups=groups)
        for needed in ([0], [1], kernels.ALL):
            yield kernels.group_norm_backward(args, args[0], args[0], groups=groups, needed=needed)
