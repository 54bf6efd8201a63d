"""Group norm of groups that several blocks share, forward and backward, on a CPU."""

from typing import Any

import numpy as np
import pytest

from eqxcallback.ops.norm import _cuda_group_norm_parts as cuda

from ..ops.norm.cases import group_norm
from ..ops.table import DTYPES, normal
from . import kernels
from .checking import SEEDS, check, want
from .kernels import F32, results
from .test_cuda_group_norm import check_gradients, parameters


# Channels of a part and elements of each, which leave over: one part, whole channels, and pieces of them.
DIVIDED = [
    ((2, 6, 70), 3, (2, 70)),
    ((3, 14, 33), 2, (3, 33)),
    ((2, 6, 264), 2, (1, 104)),
    ((1, 2, 4099), 1, (1, 1000)),
    ((1, 3, 9001), 1, (2, 9001)),
]
by_division = pytest.mark.parametrize(("shape", "groups", "division"), DIVIDED, ids=str)


def forward(args, groups, division):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_division", lambda *_: division)
        return kernels.group_norm(*args, groups=groups, kernel=cuda.GROUP_NORM)


def backward(args, groups, division, dout, needed: Any = kernels.ALL):
    """The result is not read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_division", lambda *_: division)
        out, kernel = np.full_like(args[0], np.nan), cuda.GROUP_NORM_BACKWARD
        return kernels.group_norm_backward(args, out, dout, groups=groups, needed=needed, kernel=kernel)


@by_division
def test_forward(shape, groups, division):
    for dtype, has in zip(DTYPES, [(True, True), (False, True), (True, False)], strict=True):
        case = group_norm(dtype, shape, groups, *has)
        args = parameters(case, *has)
        for options in ({}, {"misaligned": True})[: 2 if dtype == F32 else 1]:
            check(results(forward(args, groups, division), seed=3, **options)[0], case.want(), case.terms)


@by_division
def test_backward(shape, groups, division):
    for dtype, has in zip(DTYPES, [(True, True), (False, True), (True, False)], strict=True):
        case, dout = group_norm(dtype, shape, groups, *has), normal(9, shape, dtype)
        args = parameters(case, *has)
        for options in ({}, {"misaligned": True})[: 2 if dtype == F32 else 1]:
            check_gradients(case, args, results(backward(args, groups, division, dout), **options), dout)


def test_more_parts_than_threads():
    case, dout = group_norm(F32, (1, 1, 2100), 1), normal(9, (1, 1, 2100))
    args = parameters(case)
    check(results(forward(args, 1, (1, 8)))[0], case.want(), case.terms)
    check_gradients(case, args, results(backward(args, 1, (1, 8), dout)), dout)


@pytest.mark.parametrize("division", [(2, 100), (1, 40)], ids=str)
def test_gradients_that_are_not_needed(division):
    """Each set of them: without `x` there is no launch for it, and without parameters none for their sums."""
    shape = (2, 6, 100)
    case, dout = group_norm(F32, shape, 2), normal(9, shape)
    args = parameters(case)
    for needed in [[0], [1], [2], [0, 2]]:
        call = backward(args, 2, division, dout, needed)
        assert len(call.launches) == 4 - (needed == [0]) - (0 not in needed)
        check_gradients(case, args, results(call), dout, needed)


@pytest.mark.parametrize("factor", [2.0**63, 2.0**66, 2.0**124])
def test_groups_whose_squares_overflow(factor):
    """Their norm is that of the small group, and its derivative is inverse to their size."""
    shape, division = (3, 2, 700), (1, 104)
    case, dout = group_norm(F32, shape, 2), normal(9, shape)
    factors = np.array([1.0, factor, factor], np.float32).reshape(3, 1, 1)
    x, weight, bias = parameters(case)
    large = x * factors, weight, bias
    check(results(forward(large, 2, division))[0], case.want(), case.terms)
    dx, *others = results(backward(large, 2, division, dout))
    check_gradients(case, (x, weight, bias), [dx * factors, *others], dout)


def test_parts_far_apart():
    """The squares around the mean of a row are nearly all between its parts, whose means are as far from 0."""
    case = group_norm(F32, (2, 6, 120), 1)
    x, weight, bias = parameters(case)
    x += np.repeat(np.array([1e4, 3e4, -2e4], np.float32), 2)[:, None]
    for division in ((2, 120), (1, 40)):
        got = results(forward((x, weight, bias), 1, division))[0]
        # As exact as one sum of numbers of 3e4, of which differences of 1 are what is left.
        np.testing.assert_allclose(got, want(case.reference, x, weight, bias), atol=1e-4)


def test_values_at_the_edges():
    """A group each: zeros, one value everywhere, NaN, and both infinities. They stay in their group."""
    case = group_norm(F32, (5, 4, 50), 2)
    x, weight, bias = parameters(case)
    x[0, :2], x[1, :2], x[3, 0, 7], x[4, 0, 5], x[4, 3, 19] = 0, 3e38, np.nan, np.inf, -np.inf
    expected = want(case.reference, x, weight, bias).copy()
    expected[1, :2] = bias[:2, None]  # the reference divides rounding errors
    for division in ((1, 50), (1, 16)):
        check(results(forward((x, weight, bias), 2, division))[0], expected, 100)


def test_the_order_of_threads_does_not_matter():
    for shape, division in (((3, 4, 100), (1, 32)), ((2, 40, 7), (3, 7))):
        args = parameters(group_norm(F32, shape, 2))
        for call in (forward(args, 2, division), backward(args, 2, division, args[0])):
            first, *others = ([x.tobytes() for x in results(call, seed)] for seed in SEEDS)
            for other in others:
                assert first == other


def test_which_groups_are_divided():
    """`(batch, channels, size)` in 32 groups of 16 bits, on 132 multiprocessors: few large ones, many small, many large."""
    for shape, divided in [
        ((1, 320, 4096), True),
        ((1, 320, 256), False),
        ((64, 320, 1024), False),
        ((64, 320, 4096), False),
        ((64, 512, 4096), True),
        ((0, 512, 4096), False),
    ]:
        assert cuda._is_divided(np.empty(shape, np.float16), 32) is divided, shape


@pytest.mark.parametrize("groups", [1, 2, 32])
@pytest.mark.parametrize(
    "shape", [(1, 512, 4096), (1, 320, 4096), (2, 32, 9001), (1, 128, 262_144), (8, 512, 4096)], ids=str
)
def test_the_division_covers_a_group(shape, groups):
    """Whole channels, or pieces of one, none of them empty; 16 KiB are the most, but of groups in more than 512 parts."""
    x = np.broadcast_to(np.float16(0), shape)
    channels, size = cuda._division(x, groups)
    in_group, whole = shape[1] // groups, shape[2]
    pieces = cuda._pieces(x, groups)
    assert channels == 1 or size == whole
    assert (pieces - 1) * size < whole <= pieces * size
    assert pieces == 1 or size % 8 == 0
    parts = cuda._parts(x, groups)
    assert (parts // pieces - 1) * channels < in_group <= parts // pieces * channels
    assert channels * size * 2 <= 16 << 10 or parts >= 512
    # Not many more than needed: every multiprocessor has something to do, or each part a quarter of what fits.
    assert cuda._blocks(x, groups) <= max(2 * 3 * 132, 2 * x.nbytes // (16 << 10) + 2 * in_group)


def calls(dtype):
    for shape, groups, division in (((1, 3, 70), 1, (2, 70)), ((1, 2, 264), 2, (1, 104))):
        args = parameters(group_norm(dtype, shape, groups))
        yield forward(args, groups, division)
        for needed in ([0], kernels.ALL):
            yield backward(args, groups, division, args[0], needed)
