"""Rows written into a cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def cache_append(cache: Array, rows: Array, position: Int[Array, "*batch"], *, row_rank: int) -> Array:
    """`cache`: `(*batch, length, *row)`; `rows`: `(*batch, count, *row)`, where `row` has `row_rank` axes."""

    def one(cache: Array, rows: Array, position: Array) -> Array:
        # A negative position is clamped like one that is too high: it does not count from the end.
        return jax.lax.dynamic_update_slice_in_dim(cache, rows, jnp.maximum(position, 0), axis=0)

    for _ in range(cache.ndim - row_rank - 1):
        one = jax.vmap(one)
    return one(cache, rows, position)
