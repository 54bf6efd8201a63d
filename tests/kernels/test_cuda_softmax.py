"""Softmax, forward and backward, on a CPU."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from . import kernels
from .checking import SEEDS, check, normal, want, want_gradients
from .kernels import DTYPES, F32, results


# Less than a pack, odd, one warp and several warps a row, and more than the threads of a block take at once.
SHAPES = [(1, 1), (5, 7), (9, 264), (3, 1001), (2, 50_257)]
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
by_mask = pytest.mark.parametrize("mask_rows", [None, 1, 3, 6], ids=str)


@functools.cache
def reference(scale):
    """With a mask for each row, or None: one in which something takes part."""

    def of(x, mask=None):
        return jax.nn.softmax(scale * x, where=mask)

    return of


def example(shape, dtype, mask_rows=None) -> Any:
    """`x`, and a mask of so many rows."""
    x = normal(1, shape, dtype, 3.0)
    if mask_rows is None:
        return x, None
    mask = np.random.default_rng(2).random((mask_rows, shape[-1])) < 0.6
    mask[:, shape[-1] // 2] = True
    return x, mask


def tiled(x, mask) -> Any:
    """The arguments of the reference."""
    return (x,) if mask is None else (x, np.tile(mask, (len(x) // len(mask), 1)))


def calls(dtype):
    for shape, mask_rows in itertools.product(((6, 7), (3, 264), (3, 1001)), (None, 1, 3)):
        x, mask = example(shape, dtype, mask_rows)
        yield kernels.softmax(x, mask, scale=0.5)
        yield kernels.softmax_backward(x, mask, x, x, scale=0.5)


@by_shape
def test_of_any_size(shape):
    for dtype, scale in itertools.product(DTYPES, (1.0, -0.3)):
        x, _ = example(shape, dtype)
        (out,) = results(kernels.softmax(x, None, scale=scale))
        check(out, want(reference(scale), x), shape[1])


@by_mask
@pytest.mark.parametrize("size", [1, 7, 264])
def test_forward(size, mask_rows):
    """What the mask hides is NaN."""
    for dtype in DTYPES:
        x, mask = example((6, size), dtype, mask_rows)
        args = tiled(x, mask)
        expected = want(reference(0.5), *args)
        if mask is not None:
            x = np.where(args[1], x, np.asarray(np.nan, dtype))
        for options in ({}, {"misaligned": True}):
            (out,) = results(kernels.softmax(x, mask, scale=0.5), seed=3, **options)
            check(out, expected, size)
            assert mask is None or (out[~args[1]] == 0).all()


@by_mask
@pytest.mark.parametrize("shape", [(6, 1), (6, 7), (6, 264), (6, 1001)], ids=str)
def test_backward(shape, mask_rows):
    """The result is not read, nor the cotangent of what is hidden."""
    for dtype in DTYPES:
        x, mask = example(shape, dtype, mask_rows)
        args, dout = tiled(x, mask), normal(3, shape, dtype)
        exact = np.asarray(want(reference(-0.5), *args), np.float64)
        there = True if mask is None else args[1]
        upstream = np.where(there, dout, 0).astype(np.float64)
        expected = -0.5 * exact * (upstream - (exact * upstream).sum(-1, keepdims=True)) * there
        hidden = np.where(there, dout, np.asarray(np.nan, dtype))
        call = kernels.softmax_backward(x, mask, np.full_like(x, np.nan), hidden, scale=-0.5)
        for options in ({}, {"misaligned": True}):
            got, of_mask = results(call, seed=2, **options)
            check(got, expected, shape[1])
            assert of_mask is None


def test_the_formula_is_the_derivative():
    x, mask = example((6, 40), F32, 3)
    dout = normal(3, x.shape)
    got, _ = results(kernels.softmax_backward(x, mask, np.full_like(x, np.nan), dout, scale=0.7))
    args = tiled(x, mask)
    expected = want_gradients(lambda x: reference(0.7)(x, jnp.asarray(args[1])), dout, x)[0]
    check(got, expected, 40)


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
    expected = np.array(want(reference(1.0), x, mask))
    expected[6] = 0
    (got,) = results(kernels.softmax(x, mask, scale=1.0))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[~mask], 0)
    (got,) = results(kernels.softmax(-x[:2], None, scale=-1e3))
    assert got[0, 7] == 1
    assert (got[1, :2] == 0.5).all()
    dx, _ = results(kernels.softmax_backward(x, mask, np.where(mask, expected, 0), normal(3, x.shape), scale=1.0))
    assert (dx[~mask] == 0).all()
