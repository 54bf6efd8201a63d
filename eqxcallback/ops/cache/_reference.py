"""Rows written into a cache."""

from jaxtyping import Array, Int

from .._reference_append import append


def cache_append(cache: Array, rows: Array, position: Int[Array, "*batch"], *, row_rank: int) -> Array:
    """`cache`: `(*batch, length, *row)`; `rows`: `(*batch, count, *row)`, where `row` has `row_rank` axes."""
    # The op knows its operands by the names that they have here.
    return append(cache, rows, position, row_rank=row_rank)
