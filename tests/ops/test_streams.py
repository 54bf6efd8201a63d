"""Results that are larger than the caches, which kernels write past them: the same as those of calls that are smaller."""

import pathlib
import re

import jax
import numpy as np
import pytest

from .families import tagged
from .table import DTYPES, normal


ROOT = pathlib.Path(__file__).parents[2]
LAST_CACHE_BYTES = 32 << 20
PARTS = 4


def test_the_limit():
    text = (ROOT / "csrc/cpu/kernels/streams.h").read_text()
    assert re.findall(r"kLastCacheBytes = int64_t\{(\d+)\} << 20;", text) == [str(LAST_CACHE_BYTES >> 20)]


@pytest.mark.parametrize("row", tagged("streamed"), ids=str)
def test_large_results(isa, row):
    case = row(DTYPES[0])
    x = case.args[0]
    assert 2 * x.nbytes > LAST_CACHE_BYTES > 5 * x.nbytes / PARTS
    of_rows = [arg for arg in case.args if len(arg) == len(x)]
    parameters = case.args[len(of_rows) :]
    upstream = normal(9, jax.eval_shape(case.op, *case.args).shape)

    @jax.jit
    def results(upstream, *of_rows):
        out, pull = jax.vjp(lambda *of_rows: case.op(*of_rows, *parameters), *of_rows)
        # Labels have no gradient.
        return out, [dx for dx, x in zip(pull(upstream), of_rows, strict=True) if dx.dtype == x.dtype]

    whole = results(upstream, *of_rows)
    parts = [results(*arrays) for arrays in zip(*(np.split(a, PARTS) for a in (upstream, *of_rows)), strict=True)]
    for got, *want in zip(*map(jax.tree.leaves, (whole, *parts)), strict=True):
        np.testing.assert_array_equal(got, np.concatenate(want))
