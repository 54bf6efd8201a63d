"""SwiGLU, forward and backward, on a CPU."""

import numpy as np
import pytest

from eqxcallback import reference

from . import kernels
from .checking import SEEDS, check, normal, want, want_gradients
from .kernels import BF16, DTYPES, F32, results


SHAPES = [(1, 1), (3, 7), (5, 64), (2, 1001)]
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@by_shape
def test_forward(shape):
    for dtype in DTYPES:
        gate, up = normal(1, shape, dtype, 4.0), normal(2, shape, dtype)
        expected = want(reference.swiglu, gate, up)
        check(results(kernels.swiglu(gate, up))[0], expected, 1)
        check(results(kernels.swiglu_packed(np.concatenate([gate, up], 1)))[0], expected, 1)


@by_shape
def test_backward(shape):
    for dtype in DTYPES:
        gate, up, dout = normal(1, shape, dtype, 4.0), normal(2, shape, dtype), normal(3, shape, dtype)
        out = np.full(shape, np.nan, dtype)
        expected = want_gradients(reference.swiglu, dout, gate, up)
        got = results(kernels.swiglu_backward(gate, up, out, dout), seed=2)
        (both,) = results(kernels.swiglu_packed_backward(np.concatenate([gate, up], 1), out, dout))
        for mine, half, gradient in zip(got, np.split(both, 2, axis=1), expected, strict=True):
            check(mine, gradient, 2)
            check(half, gradient, 2)


def test_any_alignment_and_grid():
    for dtype in DTYPES:
        gate, up = normal(1, (5, 640), dtype, 4.0), normal(2, (5, 640), dtype)
        expected = want(reference.swiglu, gate, up)
        gradients = want_gradients(reference.swiglu, up, gate, up)
        both = np.concatenate([gate, up], 1)
        for options in ({"misaligned": True}, {}):
            for call in (kernels.swiglu(gate, up), kernels.swiglu_packed(both)):
                check(results(kernels.with_one_block(call), **options)[0], expected, 1)
            got = results(kernels.with_one_block(kernels.swiglu_backward(gate, up, up, up)), **options)
            (packed,) = results(kernels.with_one_block(kernels.swiglu_packed_backward(both, up, up)), **options)
            for mine, half, gradient in zip(got, np.split(packed, 2, axis=1), gradients, strict=True):
                check(mine, gradient, 2)
                check(half, gradient, 2)


def test_the_order_of_threads_does_not_matter():
    call = kernels.swiglu(normal(1, (3, 301), BF16), normal(2, (3, 301), BF16))
    assert len({results(call, seed)[0].tobytes() for seed in SEEDS}) == 1


def test_no_elements():
    for shape in ((0, 6), (3, 0)):
        x = np.empty(shape, np.float32)
        assert results(kernels.swiglu(x, x))[0].shape == shape
        assert results(kernels.swiglu_packed(np.concatenate([x, x], 1)))[0].shape == shape


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_values_at_the_edges(dtype):
    values = [1e-38, 1e-20, 1e-3, 80, -80, -88, 90, -90, 100, -100, 3e4, -3e4, 3e38, -3e38, 0, -0.0]
    gate = np.array([[*values, np.nan, np.inf, -np.inf]], dtype)
    up = np.ones_like(gate)
    expected = want(reference.swiglu, gate, up)
    got = results(kernels.swiglu(gate, up))[0]
    check(got, expected, 1, scale=1e-30)
    assert np.array_equal(np.signbit(got[0, :16]), np.signbit(expected[0, :16]))
    gradients = results(kernels.swiglu_backward(gate, up, got, up))
    for mine, gradient in zip(gradients, want_gradients(reference.swiglu, up, gate, up), strict=True):
        check(mine, gradient, 1, scale=1e-30)
