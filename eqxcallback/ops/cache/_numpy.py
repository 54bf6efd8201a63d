"""Rows written into a cache, in place."""

from types import ModuleType

from ...kernel import PythonKernel
from .._numpy import XpArray, append, on_arrays
from . import _cuda


@on_arrays
def cache_append(
    xp: ModuleType, out: XpArray, cache: XpArray, rows: XpArray, position: XpArray, *, row_rank: int
) -> None:
    """`out` starts as the cache."""
    append(out, rows, position, row_rank=row_rank)


CACHE_APPEND = PythonKernel(
    cache_append, aliases={"cache": 0}, supports=_cuda.CACHE_APPEND.supports, only_if_chosen=True
)
