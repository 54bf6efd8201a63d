"""Rows written into a cache, in place."""

from typing import Any

import numpy as np

from ...kernel import PythonKernel
from .._numpy import on_arrays, to_host
from . import _cuda


@on_arrays
def cache_append(xp: Any, out: Any, cache: Any, rows: Any, position: Any, *, row_rank: int) -> None:
    """`out` starts as the cache."""
    batch = out.shape[: out.ndim - row_rank - 1]
    length, count = out.shape[len(batch)], rows.shape[len(batch)]
    first = np.broadcast_to(np.clip(to_host(position), 0, length - count), batch)
    for index in np.ndindex(batch):
        out[index][first[index] : first[index] + count] = rows[index]


CACHE_APPEND = PythonKernel(
    cache_append, aliases={"cache": 0}, supports=_cuda.CACHE_APPEND.supports, only_if_chosen=True
)
