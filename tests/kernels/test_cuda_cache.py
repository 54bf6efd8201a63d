"""Rows appended to a cache, on a CPU."""

import numpy as np
import pytest

from ..ops.table import normal
from . import kernels
from .checking import ROWS, SEEDS
from .kernels import BF16, F32, results


# Those that say where, and the others.
CLAMPED = [row for row in ROWS["cache_append"] if len(row.arguments) == 5]
ANYWHERE = [row for row in ROWS["cache_append"] if row not in CLAMPED]


def appended(cache, rows, position):
    position = np.resize(position, len(cache))
    out = cache.copy()
    for b, wanted in enumerate(position):
        first = min(max(int(wanted), 0), cache.shape[1] - rows.shape[1])
        out[b, first : first + rows.shape[1]] = rows[b]
    return out


@pytest.mark.parametrize("dtype", [np.dtype(np.int8), BF16, F32, np.dtype(np.complex64)], ids=str)
@pytest.mark.parametrize("row", ANYWHERE, ids=str)
def test_values(row, dtype):
    cache, rows = ((100 * x).astype(dtype) for x in row(F32).args[:2])
    for position in (np.arange(-1, len(cache) - 1), np.array([4])):
        call = kernels.cache_append(cache, rows, position.astype(np.int32))
        expected = appended(cache, rows, position).tobytes()
        assert results(call)[0].tobytes() == expected
        assert results(kernels.with_one_block(call), misaligned=True)[0].tobytes() == expected


@pytest.mark.parametrize("row", CLAMPED, ids=str)
def test_positions_are_clamped(row):
    """One position, which all examples have."""
    case, expected = row.wanted(F32)
    cache, rows, positions = case.args
    (got,) = results(kernels.cache_append(cache, rows, positions[:1]))
    np.testing.assert_array_equal(got, appended(cache, rows, positions))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2), (2, 3, 0)], ids=str)
def test_nothing_to_write(shape):
    cache = np.zeros(shape, np.float32)
    rows = cache[:, :1]
    assert results(kernels.cache_append(cache, rows, np.zeros(1, np.int32)))[0].shape == shape


def test_the_order_of_threads_does_not_matter():
    call = kernels.cache_append(normal(1, (2, 90, 9)), normal(2, (2, 60, 9)), np.array([5, 40], np.int32))
    assert len({results(call, seed)[0].tobytes() for seed in SEEDS}) == 1
