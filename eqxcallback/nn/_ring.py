"""Rows of a ring buffer: token `t` is in slot `t % slots`, so that the newest token overwrites the oldest."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .. import ops


def append(ring: Array, rows: Array, length: Int[Array, ""], valid: Int[Array, ""] | None) -> Array:
    """`ring` with the first `valid` of `rows`, by default all, after `length` tokens. The other slots keep what they have."""
    slots, count = ring.shape[0], rows.shape[0]
    if count == 1 and valid is None:
        return ops.cache_append(ring, rows, length % slots)
    kept = jnp.asarray(count, jnp.int32) if valid is None else valid
    if count > slots:
        skipped = jnp.clip(kept - slots, 0, count - slots)
        rows = jax.lax.dynamic_slice_in_dim(rows, skipped, slots)
        length, kept, count = length + skipped, kept - skipped, slots
    first = length % slots
    # Rows that go around the end are two writes, each as long as all rows: where a slot gets none, it is written as it is.
    starts = [jnp.minimum(first, slots - count), jnp.zeros_like(first)]
    for start in starts[: 1 if count in (1, slots) else 2]:
        index = (start + jnp.arange(count, dtype=jnp.int32) - first) % slots
        here = (index < kept).reshape(count, *[1] * (rows.ndim - 1))
        old = jax.lax.dynamic_slice_in_dim(ring, start, count)
        new = jnp.take(rows, index, axis=0, mode="clip")
        ring = ops.cache_append(ring, jnp.where(here, new, old), start)
    return ring


def ages(slots: int, length: Int[Array, ""]) -> Int[Array, " slots"]:
    """Count the tokens that came after that of each slot. A slot that no token has used yet is as old as `length`, or older."""
    return (length - 1 - jnp.arange(slots, dtype=jnp.int32)) % slots


def unrolled(ring: Array, length: Int[Array, ""], room: int) -> Array:
    """A copy with the oldest token first. Slots without a token come last, and `room` more of them."""
    slots = ring.shape[0]
    oldest = jnp.maximum(length - slots, 0)
    order = (oldest + jnp.arange(slots, dtype=jnp.int32)) % slots
    return jnp.pad(jnp.take(ring, order, axis=0, mode="clip"), [(0, room), *[(0, 0)] * (ring.ndim - 1)])
