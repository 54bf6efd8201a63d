"""Rows appended to a cache, on a CPU."""

from typing import Any

import numpy as np
import pytest

from eqxcallback.ops.cache import _reference as reference

from . import kernels
from .checking import SEEDS, normal
from .kernels import BF16, results


CASES = [(batch, 7, count, row) for batch in (1, 3) for count, row in ((0, (3,)), (1, ()), (3, (2, 5)), (7, (8,)))]


def appended(cache, rows, position):
    position = np.resize(position, len(cache))
    out = cache.copy()
    for b, wanted in enumerate(position):
        first = min(max(int(wanted), 0), cache.shape[1] - rows.shape[1])
        out[b, first : first + rows.shape[1]] = rows[b]
    return out


@pytest.mark.parametrize("dtype", [np.dtype(np.int8), BF16, np.dtype(np.float32), np.dtype(np.complex64)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case, dtype):
    batch, length, count, row = case
    cache = (100 * normal(1, (batch, length, *row))).astype(dtype)
    rows = (100 * normal(2, (batch, count, *row))).astype(dtype)
    for position in (np.arange(-1, batch - 1), np.array([4])):
        call = kernels.cache_append(cache, rows, position.astype(np.int32))
        expected = appended(cache, rows, position).tobytes()
        assert results(call)[0].tobytes() == expected
        assert results(kernels.with_one_block(call), misaligned=True)[0].tobytes() == expected


@pytest.mark.parametrize("position", [-(2**31), -1, 0, 6, 7, 8, 2**31 - 1])
def test_positions_are_clamped(position):
    cache, rows = normal(1, (2, 9, 3)), normal(2, (2, 2, 3))
    positions = np.array([position], np.int32)
    of_batch: Any = np.resize(positions, 2)
    (got,) = results(kernels.cache_append(cache, rows, positions))
    np.testing.assert_array_equal(got, appended(cache, rows, positions))
    expected = reference.cache_append(cache, rows, of_batch, row_rank=1)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2), (2, 3, 0)], ids=str)
def test_nothing_to_write(shape):
    cache = np.zeros(shape, np.float32)
    rows = cache[:, :1]
    assert results(kernels.cache_append(cache, rows, np.zeros(1, np.int32)))[0].shape == shape


def test_the_order_of_threads_does_not_matter():
    call = kernels.cache_append(normal(1, (2, 90, 9)), normal(2, (2, 60, 9)), np.array([5, 40], np.int32))
    assert len({results(call, seed)[0].tobytes() for seed in SEEDS}) == 1
