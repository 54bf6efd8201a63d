"""Rotary embedding, forward and backward, on a CPU."""

import numpy as np
import pytest

from eqxcallback.ops.rotary import _reference as reference

from . import kernels
from .checking import SEEDS, check, normal, want, want_gradients
from .kernels import DTYPES, F32, results


# Rows, rows of the table, heads, size: packs, no packs, more heads than a thread has, tables shared by a batch.
SHAPES = [(3, 3, 2, 2), (4, 2, 5, 32), (6, 3, 9, 12), (1, 1, 3, 128), (6, 2, 1, 18)]
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def rotated(x, cos, sin):
    """The reference, of one axis of batch, which the table may lack."""
    rows = (x.shape[0] // cos.shape[0], *cos.shape[:1], *x.shape[1:])
    return reference.rotary_embedding(x.reshape(rows), cos, sin).reshape(x.shape)


def example(shape, dtype):
    rows, table_rows, heads, size = shape
    angles = normal(2, (table_rows, size // 2))
    return normal(1, (rows, heads, size), dtype), np.cos(angles), np.sin(angles)


@by_shape
def test_forward(shape):
    for dtype in DTYPES:
        args = example(shape, dtype)
        check(results(kernels.rotary(*args))[0], want(rotated, *args), 2)


@by_shape
def test_backward(shape):
    for dtype in DTYPES:
        args = example(shape, dtype)
        dout = normal(3, args[0].shape, dtype)
        expected = want_gradients(rotated, dout, *args)
        got = results(kernels.rotary_backward(*args, out=dout, dout=dout), seed=2)
        for mine, gradient in zip(got, expected, strict=True):
            check(mine, gradient, shape[0] * shape[2], scale=16.0)


@by_shape
def test_gradients_that_are_not_needed(shape):
    """Each set of them. A pointer for one that is not needed is null: to write there ends the process."""
    for dtype in DTYPES:
        args = example(shape, dtype)
        dout = normal(3, args[0].shape, dtype)
        expected = want_gradients(rotated, dout, *args)
        for needed in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
            call = kernels.rotary_backward(*args, out=dout, dout=dout, needed=needed)
            for options in ({}, {"misaligned": True}):
                for i, (mine, gradient) in enumerate(zip(results(call, **options), expected, strict=True)):
                    if i in needed:
                        check(mine, gradient, shape[0] * shape[2], scale=16.0)
                    else:
                        assert mine is None


def test_any_alignment_and_grid():
    for dtype in DTYPES:
        args = example((4, 2, 5, 32), dtype)
        dout = normal(3, args[0].shape, dtype)
        forward, backward = kernels.rotary(*args), kernels.rotary_backward(*args, out=dout, dout=dout)
        for options in ({"misaligned": True}, {}):
            check(results(kernels.with_one_block(forward), **options)[0], want(rotated, *args), 2)
            expected = want_gradients(rotated, dout, *args)
            for mine, gradient in zip(results(kernels.with_one_block(backward), **options), expected, strict=True):
                check(mine, gradient, 20, scale=16.0)


def test_the_order_of_threads_does_not_matter():
    call = kernels.rotary(*example((6, 3, 9, 12), F32))
    assert len({results(call, seed)[0].tobytes() for seed in SEEDS}) == 1


@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (3, 3, 0, 4), (3, 3, 2, 0)], ids=str)
def test_nothing_to_rotate(shape):
    x, cos, sin = example(shape, F32)
    assert results(kernels.rotary(x, cos, sin))[0].shape == x.shape
    for gradient in results(kernels.rotary_backward(x, cos, sin, x, x))[1:]:
        np.testing.assert_array_equal(gradient, np.zeros_like(cos))


def test_not_finite():
    x, cos, sin = example((4, 2, 5, 32), F32)
    x[0, 0, 3], x[1, 2, 20], cos[1, 5] = np.nan, np.inf, -np.inf
    check(results(kernels.rotary(x, cos, sin))[0], want(rotated, x, cos, sin), 2)
