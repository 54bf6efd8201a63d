"""Rotary embedding, forward and backward, on a CPU."""

import math

import numpy as np
import pytest

from eqxcallback.ops.rotary._reference import rotary_embedding as reference

from ..ops.rotary.cases import rotary_append, rotary_embedding
from ..ops.table import DTYPES, normal
from . import kernels
from .checking import ROWS, SEEDS, check, want, want_gradients
from .kernels import F32, results


by_row = pytest.mark.parametrize("row", ROWS["rotary_embedding"], ids=str)


def rotated(x, cos, sin):
    """The reference, of one axis of batch, which the table may lack."""
    rows = (x.shape[0] // cos.shape[0], *cos.shape[:1], *x.shape[1:])
    return reference(x.reshape(rows), cos, sin).reshape(x.shape)


def flat(case):
    """Operands with one axis of rows, as the kernels have them."""
    x, *table = case.args
    return rows_of(x, 2), *(rows_of(angles, 1) for angles in table)


def rows_of(x, rank):
    return x.reshape(math.prod(x.shape[:-rank]), *x.shape[-rank:])


def example(shape, dtype):
    """With one table for the examples of a batch."""
    return flat(rotary_embedding(dtype, shape, True))


@by_row
def test_forward(row):
    for dtype in DTYPES:
        case, expected = row.wanted(dtype)
        args = flat(case)
        check(results(kernels.rotary(*args))[0], expected.reshape(args[0].shape), case.terms)


@by_row
def test_backward(row):
    for dtype in DTYPES:
        args = flat(row(dtype))
        dout = normal(3, args[0].shape, dtype)
        expected = want_gradients(rotated, dout, *args)
        got = results(kernels.rotary_backward(*args, out=dout, dout=dout), seed=2)
        for mine, gradient in zip(got, expected, strict=True):
            check(mine, gradient, len(dout) * dout.shape[1], scale=16.0)


@by_row
def test_gradients_that_are_not_needed(row):
    """Each set of them. A pointer for one that is not needed is null: to write there ends the process. The gradient of `x` alone
    does not read `x`.
    """
    for dtype in DTYPES:
        args = flat(row(dtype))
        dout = normal(3, args[0].shape, dtype)
        expected = want_gradients(rotated, dout, *args)
        for needed in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
            x = np.full_like(args[0], np.nan) if needed == (0,) else args[0]
            call = kernels.rotary_backward(x, *args[1:], out=dout, dout=dout, needed=needed)
            for options in ({}, {"misaligned": True}):
                for i, (mine, gradient) in enumerate(zip(results(call, **options), expected, strict=True)):
                    if i in needed:
                        check(mine, gradient, len(dout) * dout.shape[1], scale=16.0)
                    else:
                        assert mine is None


def test_any_alignment_and_grid():
    for dtype in DTYPES:
        args = example((2, 2, 5, 32), dtype)
        dout = normal(3, args[0].shape, dtype)
        forward, backward = kernels.rotary(*args), kernels.rotary_backward(*args, out=dout, dout=dout)
        for options in ({"misaligned": True}, {}):
            check(results(kernels.with_one_block(forward), **options)[0], want(rotated, *args), 2)
            expected = want_gradients(rotated, dout, *args)
            for mine, gradient in zip(results(kernels.with_one_block(backward), **options), expected, strict=True):
                check(mine, gradient, 20, scale=16.0)


def test_the_order_of_threads_does_not_matter():
    call = kernels.rotary(*example((2, 3, 9, 12), F32))
    assert len({results(call, seed)[0].tobytes() for seed in SEEDS}) == 1


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (3, 0, 4), (3, 2, 0)], ids=str)
def test_nothing_to_rotate(shape):
    x, cos, sin = example(shape, F32)
    assert results(kernels.rotary(x, cos, sin))[0].shape == x.shape
    for gradient in results(kernels.rotary_backward(x, cos, sin, x, x))[1:]:
        np.testing.assert_array_equal(gradient, np.zeros_like(cos))


def test_not_finite():
    x, cos, sin = example((2, 2, 5, 32), F32)
    x[0, 0, 3], x[1, 2, 20], cos[1, 5] = np.nan, np.inf, -np.inf
    check(results(kernels.rotary(x, cos, sin))[0], want(rotated, x, cos, sin), 2)


@pytest.mark.parametrize("row", ROWS["rotary_append"], ids=str)
def test_append(row):
    for dtype in DTYPES:
        case, expected = row.wanted(dtype)
        call = kernels.rotary_append(*case.args)
        for got in (results(call), results(kernels.with_one_block(call), misaligned=True)):
            together = np.concatenate([x.reshape(*x.shape[:-3], -1, x.shape[-1]) for x in got], axis=-2)
            check(together, expected, case.terms)


@pytest.mark.parametrize("position", [-(2**31), -1, 0, 4, 5, 2**31 - 1])
def test_append_at_any_position(position):
    """One position for all examples, with one table."""
    case = rotary_append(F32, (3,), 2, (2, 1), 4, 6, True)
    qkv, cos, sin, k_cache, v_cache, _ = case.args
    q, *caches = results(kernels.rotary_append(qkv, cos, sin, k_cache, v_cache, np.array([position], np.int32)))
    first = min(max(position, 0), 4)
    np.testing.assert_array_equal(caches[1][:, first : first + 2], qkv[:, :, 3:])
    check(caches[0][:, first : first + 2], want(reference, qkv[:, :, 2:3], cos, sin), 2)
    check(q, want(reference, qkv[:, :, :2], cos, sin), 2)
    for new, old in zip(caches, (k_cache, v_cache), strict=True):
        kept = np.delete(np.arange(6), np.s_[first : first + 2])
        np.testing.assert_array_equal(new[:, kept], old[:, kept])
