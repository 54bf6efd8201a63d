"""Gated linear units, forward and backward, on a CPU."""

import functools
import math
from typing import Any

import jax
import numpy as np
import pytest

from ..ops.table import DTYPES, normal
from . import kernels
from .checking import ROWS, SEEDS, check, want, want_gradients
from .kernels import BF16, F32, results


ACTIVATED = [
    *(("silu", row) for row in ROWS["swiglu"]),
    *(("gelu_tanh" if row.arguments[-1] else "gelu", row) for row in ROWS["geglu"]),
]
by_row = pytest.mark.parametrize(("activation", "row"), ACTIVATED, ids=str)


def gelu_tanh(x):
    """`jax.nn.gelu`, whose `1 + tanh(...)` is inexact in f32 for negative numbers, in other words."""
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


FUNCTIONS: dict[str, Any] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": gelu_tanh,
}


@functools.cache
def reference(activation):
    return lambda gate, up: FUNCTIONS[activation](gate) * up


@by_row
def test_forward(activation, row):
    for dtype in DTYPES:
        gate, up = row(dtype).args
        expected = want(reference(activation), gate, up)
        check(results(kernels.glu(gate, up, activation=activation))[0], expected, 1)
        check(results(kernels.glu(np.concatenate([gate, up], 1), activation=activation))[0], expected, 1)


@by_row
def test_backward(activation, row):
    for dtype in DTYPES:
        gate, up = row(dtype).args
        dout, out = normal(3, gate.shape, dtype), np.full_like(gate, np.nan)
        expected = want_gradients(reference(activation), dout, gate, up)
        got = results(kernels.glu_backward(gate, up, out, dout, activation=activation), seed=2)
        packed = kernels.glu_backward(np.concatenate([gate, up], 1), None, out, dout, activation=activation)
        both, nothing = results(packed)
        assert nothing is None
        for mine, half, gradient in zip(got, np.split(both, 2, axis=1), expected, strict=True):
            check(mine, gradient, 2)
            check(half, gradient, 2)


@by_row
def test_one_gradient(activation, row):
    """The pointer of the other one is null: to write there ends the process."""
    for dtype in DTYPES:
        gate, up = row(dtype).args
        dout = normal(3, gate.shape, dtype)
        expected = want_gradients(reference(activation), dout, gate, up)
        for needed in (0, 1):
            call = kernels.glu_backward(gate, up, dout, dout, activation=activation, needed=[needed])
            for options in ({}, {"misaligned": True}):
                got = results(call, **options)
                assert got[1 - needed] is None
                check(got[needed], expected[needed], 2)


def test_any_alignment_and_grid():
    for dtype in DTYPES:
        gate, up = normal(1, (5, 640), dtype, 4.0), normal(2, (5, 640), dtype)
        expected = want(reference("silu"), gate, up)
        gradients = want_gradients(reference("silu"), up, gate, up)
        both = np.concatenate([gate, up], 1)
        for options in ({"misaligned": True}, {}):
            for args in ((gate, up), (both, None)):
                call = kernels.glu(*args, activation="silu")
                check(results(kernels.with_one_block(call), **options)[0], expected, 1)
            got, (packed, _) = (
                results(kernels.with_one_block(kernels.glu_backward(*args, up, up, activation="silu")), **options)
                for args in ((gate, up), (both, None))
            )
            for mine, half, gradient in zip(got, np.split(packed, 2, axis=1), gradients, strict=True):
                check(mine, gradient, 2)
                check(half, gradient, 2)


def test_the_order_of_threads_does_not_matter():
    call = kernels.glu(normal(1, (3, 301), BF16), normal(2, (3, 301), BF16), activation="silu")
    assert len({results(call, seed)[0].tobytes() for seed in SEEDS}) == 1


def test_no_elements():
    for shape in ((0, 6), (3, 0)):
        x = np.empty(shape, np.float32)
        assert results(kernels.glu(x, x, activation="silu"))[0].shape == shape
        assert results(kernels.glu(np.concatenate([x, x], 1), activation="silu"))[0].shape == shape


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_values_at_the_edges(dtype):
    values = [1e-38, 1e-20, 1e-3, 80, -80, -88, 90, -90, 100, -100, 3e4, -3e4, 3e38, -3e38, 0, -0.0]
    gate = np.array([[*values, np.nan, np.inf, -np.inf]], dtype)
    up = np.ones_like(gate)
    expected = want(reference("silu"), gate, up)
    got = results(kernels.glu(gate, up, activation="silu"))[0]
    check(got, expected, 1, scale=1e-30)
    assert np.array_equal(np.signbit(got[0, :16]), np.signbit(expected[0, :16]))
    gradients = results(kernels.glu_backward(gate, up, got, up, activation="silu"))
    for mine, gradient in zip(gradients, want_gradients(reference("silu"), up, gate, up), strict=True):
        check(mine, gradient, 1, scale=1e-30)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_values_of_gelu_at_the_edges(dtype, activation):
    values = [1e-38, 1e-20, 1e-3, 3, -3, 7, -7, 15, -15, 16, -16, 17, -17, 100, -100, 3e4, -3e4, 3e38, -3e38, 0, -0.0]
    gate = np.array([[*values, np.nan]], dtype)
    up = np.ones_like(gate)
    wide = gate.astype(np.float32)
    inside = np.abs(np.nan_to_num(wide, nan=100)) < 15
    expected = np.where(inside, want(reference(activation), gate, up), np.maximum(wide, 0))
    got = results(kernels.glu(gate, up, activation=activation))[0]
    check(got, expected, 1, scale=1.0)
    slopes = np.where(inside, want_gradients(reference(activation), up, gate, up)[0], np.heaviside(wide, 0))
    of_gate, of_up = results(kernels.glu_backward(gate, up, got, up, activation=activation))
    check(of_gate, slopes, 1, scale=1.0)
    check(of_up, expected, 1, scale=1.0)
