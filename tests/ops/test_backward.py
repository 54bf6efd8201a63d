"""The gradients of kernels, on every instruction set, against those of the references."""

import functools

import jax
import numpy as np
import pytest

from eqxcallback import _ext

from .families import tagged
from .gradients import check, every_gradient, gradients, upstream_of
from .table import DTYPES, floating


pytestmark = pytest.mark.any_jax_version

ROWS, LARGE = tagged("gradient"), tagged("large gradient")


@functools.cache
def every_case(dtype):
    cases = [row(dtype) for row in ROWS]
    upstreams = [upstream_of(case) for case in cases]
    return (
        cases,
        upstreams,
        every_gradient([case.reference for case in cases], [case.wide() for case in cases], upstreams),
    )


@functools.cache
def every_result(dtype, isa):
    assert isa == _ext.isa()
    cases, upstreams, _ = every_case(dtype)
    return every_gradient([case.op for case in cases], [case.args for case in cases], upstreams)


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda number: str(ROWS[number]))
def test_values(number, isa):
    for dtype in DTYPES:
        cases, _, wants = every_case(dtype)
        check(cases[number], every_result(dtype, isa)[number], wants[number])


@pytest.mark.parametrize("row", LARGE, ids=str)
def test_work_for_many_threads(row, isa):
    case = row(DTYPES[0])
    upstream = upstream_of(case)
    first, second = (gradients(case.op, case.args, upstream) for _ in range(2))
    check(case, first, gradients(case.reference, case.wide(), upstream))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("row", LARGE, ids=lambda row: row.make.__name__)
def test_kernels_compute_them(row):
    case, name = row(DTYPES[0]), row.make.__name__
    text = jax.jit(jax.grad(lambda *args: case.op(*args).sum(), floating(case.args))).lower(*case.args).as_text()
    symbol = {"rms_norm": "norm", "layer_norm": "norm", "swiglu": "glu"}.get(name, name)
    assert f"@eqxcallback_{symbol}_backward" in text
