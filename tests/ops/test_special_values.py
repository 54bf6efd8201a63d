"""Values that are not finite, too large or too small, where each element is for itself, and how results are rounded."""

from typing import Any

import jax
import numpy as np
import pytest

from eqxcallback import ops

from . import table
from .glu.cases import swiglu
from .norm.cases import rms_norm
from .rotary.cases import rotary_embedding
from .special_values import TINY, fitting, replaced, same
from .table import DTYPES, normal


pytestmark = pytest.mark.any_jax_version

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@by_dtype
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 16, 33])
def test_not_finite_goes_through_elementwise(value, size, dtype, isa):
    tolerance: Any = {"rtol": max(table.ROUNDING[dtype], 2e-6)}
    for make, operands in (
        (lambda: rms_norm(dtype, (3, size)), (0, 1)),
        (lambda: swiglu(dtype, (3, size)), (0, 1)),
        (lambda: rotary_embedding(dtype, (3, 2, 2 * size)), (0, 1, 2)),
    ):
        for operand in operands:
            case = make()
            case = replaced(case, operand, (..., -1) if operand else (1, ..., size // 2), value)
            same(case, case.op(*case.args), atol=1e-6, **tolerance)


@by_dtype
def test_large_and_small_numbers_elementwise(dtype, isa):
    numbers = [1e-38, 1e-20, 1e-3, 80, -80, 90, -90, 100, -100, 3e4, -3e4, 3e38, -3e38, 0, -0.0]
    x = np.array([fitting(number, dtype) for number in numbers], dtype)
    tiny: Any = {} if dtype == np.float16 else {"x": np.array([[1e-30, 1e-25, -3e-28]], dtype)}
    for case in (
        table.Case(ops.swiglu, swiglu(dtype, (1,)).reference, (x, np.ones_like(x)), 1),
        rms_norm(dtype, (1, 15), x=x[None]),
        rms_norm(dtype, (15, 1), x=x[:, None]),
        rms_norm(dtype, (1, 3), **tiny, eps=0.0),
    ):
        with np.errstate(over="ignore"):
            atol = 2.0**-24 if dtype == np.float16 else TINY
            same(case, case.op(*case.args), rtol=max(table.ROUNDING[dtype], 2e-6), atol=atol)


@pytest.mark.parametrize("scale", [3e38, -3e38])
def test_the_highest_scales_of_softmax(scale, isa):
    x = np.array([[1.0, 2.0, 2.0, -3.0]], np.float32)
    value, pull = jax.vjp(lambda x: ops.softmax(x, scale=scale, implementation="native"), x)
    np.testing.assert_array_equal(value, [[0, 0.5, 0.5, 0]] if scale > 0 else [[0, 0, 0, 1]])
    assert np.all(np.isfinite(pull(np.ones_like(x))[0]))


@by_dtype
def test_groups_of_one_element_have_no_gradient(dtype, isa):
    """Whatever is added to such an element is subtracted again."""
    x, weight = normal(1, (4, 8, 1), dtype), np.linspace(0.3, 100, 8, dtype=np.float32)
    grad = jax.grad(lambda x: ops.group_norm(x, weight, groups=8, implementation="native").astype(np.float32).sum())
    np.testing.assert_array_equal(grad(x), 0)


@by_dtype
def test_subnormal_operands(dtype, isa):
    x = np.full((3, 17), 1e-40).astype(dtype)
    for case in (
        table.Case(ops.swiglu, swiglu(dtype, (1,)).reference, (x, normal(1, x.shape, dtype)), 1),
        rms_norm(dtype, x.shape, x=x),
    ):
        same(case, case.op(*case.args), atol=2 * TINY)


ROUNDED = {
    DTYPES[1]: [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -(1 + 2.0**-8), 3.4e38],
    # The smallest normal number, subnormal ones, and the edges of what becomes zero or infinite.
    DTYPES[2]: [
        *[1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 + 2.0**-20, -(1 + 2.0**-11), 65519.99, 65520, -1e5, 3e38],
        *[2.0**-14, 2.0**-14 - 2.0**-25, 3 * 2.0**-25, -(2.0**-24), 2.0**-25, 2.0**-25 + 2.0**-40, 1e-30],
    ],
}


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(dtype, value) for dtype, values in ROUNDED.items() for value in (0.0, -0.0, 1.0, np.nan, np.inf, *values)],
)
def test_rounded_to_the_nearest_even(dtype, value, isa):
    """By a whole vector, and by its rest. A NaN stays one, whatever its bits."""
    gate: Any = np.full((1, 37), 100.0, dtype)  # silu(100) is 100
    up: Any = np.full((1, 37), 1.0, dtype)
    weight: Any = np.full(37, value, np.float32)
    got = np.asarray(ops.rms_norm(up, weight, eps=0.0))
    with np.errstate(over="ignore"):
        want = np.full((1, 37), np.float32(value)).astype(dtype)
    assert np.array_equal(got.view(np.uint16), want.view(np.uint16)) or np.isnan(value)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    np.testing.assert_array_equal(ops.swiglu(gate, up), gate)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_nan_of_any_bits_stays_one(dtype, isa):
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7FC00000] * 8, np.uint32)
    got = np.asarray(jax.jit(ops.rms_norm)(np.ones((1, 40), dtype), bits.view(np.float32)))
    assert np.isnan(got.astype(np.float32)).all()
