"""Every kernel, on every instruction set of this machine, against its reference."""

import concurrent.futures

import jax
import numpy as np
import pytest

from . import table
from .attention.cases import attention
from .families import edges, every_case, every_result, tagged
from .linear.cases import quantized_linear
from .table import DTYPES


pytestmark = pytest.mark.any_jax_version

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EDGES = [(op, number, row) for op, rows in edges().items() for number, row in enumerate(rows)]
LARGE = tagged("large")


@pytest.mark.parametrize(("op", "number"), [edge[:2] for edge in EDGES], ids=[str(row) for *_, row in EDGES])
def test_values(op, number, isa):
    for dtype in DTYPES:
        cases, wants = every_case(op, dtype)
        cases[number].check(every_result(op, dtype, isa)[number], wants[number])


@by_dtype
@pytest.mark.parametrize("row", LARGE, ids=str)
def test_work_for_many_threads(row, dtype, isa):
    case, want = row.wanted(dtype)
    case.check(case.op(*case.args), want)


@by_dtype
@pytest.mark.parametrize("row", tagged("written"), ids=str)
def test_operands_are_left_as_they_are(row, dtype, isa):
    case = row(dtype)
    args = [jax.device_put(x.copy()) for x in case.args]
    jax.block_until_ready(case.op(*args))
    for arg, before in zip(args, case.args, strict=True):
        assert np.asarray(arg).tobytes() == before.tobytes()


def test_calls_from_many_threads_at_once():
    work = [row.wanted(dtype) for dtype in DTYPES for row in LARGE if row.make is not attention]

    def run(worker):
        for offset in range(len(work)):
            case, want = work[(worker + offset) % len(work)]
            case.check(case.op(*case.args), want)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(8)))


def test_other_floats(x64):
    """Other dtypes run the reference. Blocks are for some dtypes alone."""
    for row in tagged("written"):
        if row.make is not quantized_linear:
            case = row(np.dtype(np.float64))
            got = table.quickly_compiled(case.op)(*case.args)
            assert got.dtype == np.float64
            np.testing.assert_array_equal(got, table.quickly_compiled(case.reference)(*case.args))
