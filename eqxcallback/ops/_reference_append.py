"""Rows written into an array, as every op that keeps some defines it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def append(array: Array, rows: Array, position: Int[Array, "*batch"], *, row_rank: int) -> Array:
    """`array`: `(*batch, length, *row)`; `rows`: `(*batch, count, *row)`, where `row` has `row_rank` axes."""

    def one(array: Array, rows: Array, position: Array) -> Array:
        # A negative position is clamped like one that is too high: it does not count from the end.
        return jax.lax.dynamic_update_slice_in_dim(array, rows, jnp.maximum(position, 0), axis=0)

    for _ in range(array.ndim - row_rank - 1):
        one = jax.vmap(one)
    return one(array, rows, position)
