"""Rows written into a cache, in place."""

from typing import Any

from ...kernel import PythonKernel
from .._numpy import append, on_arrays
from . import _cuda


@on_arrays
def cache_append(xp: Any, out: Any, cache: Any, rows: Any, position: Any, *, row_rank: int) -> None:
    """`out` starts as the cache."""
    append(out, rows, position, row_rank=row_rank)


CACHE_APPEND = PythonKernel(
    cache_append, aliases={"cache": 0}, supports=_cuda.CACHE_APPEND.supports, only_if_chosen=True
)
