"""The weights that dropout keeps: what `jax.random.bernoulli` gives, for some rows of an array alone.

JAX makes an array of random bits with Threefry (https://www.thesalmons.org/john/random123/papers/random123sc11.pdf), from the
index of each element, so that a part of it needs no other part. That is so while `jax_threefry_partitionable` is on.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32


ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def kept(
    key: UInt32[Array, "*batch 2"], rows: Int[Array, " rows"], columns: Any, dropout: float
) -> Bool[Array, "*batch rows columns"]:
    """The rows `rows` of `jax.random.bernoulli(key, 1 - dropout, (any, columns))`. `key` is what `jax.random.key_data` gives,
    `columns` a number, or a symbol for one."""
    shape = (*key.shape[:-1], rows.shape[0], columns)
    high, low = (jnp.broadcast_to(jnp.expand_dims(x, range(len(shape) - 2)), shape) for x in counters(rows, columns))
    first, second = (jnp.broadcast_to(key[..., i, None, None], shape) for i in range(2))
    left, right = _threefry(first, second, high, low)
    return ((left ^ right) >> 9) < jnp.uint32(threshold(dropout))


def threshold(dropout: float) -> int:
    """Return how many of the 2^23 values of a random number in [0, 1) are kept."""
    return math.ceil(float(np.float32(1 - dropout)) * 2**23)


def counters(
    rows: Int[Array, " rows"], columns: Any
) -> tuple[UInt32[Array, "rows columns"], UInt32[Array, "rows columns"]]:
    """The upper and the lower half of `row * columns + column`, in 64 bits, which JAX does not have by default."""
    i, n = rows.astype(jnp.uint32)[:, None], jnp.asarray(columns).astype(jnp.uint32)  # it may be a symbol
    # Long multiplication, in digits of 16 bits.
    digits = [
        [(i & 0xFFFF) * (n & 0xFFFF), (i & 0xFFFF) * (n >> 16)],
        [(i >> 16) * (n & 0xFFFF), (i >> 16) * (n >> 16)],
    ]
    middle = (digits[0][0] >> 16) + (digits[0][1] & 0xFFFF) + (digits[1][0] & 0xFFFF)
    high = digits[1][1] + (digits[0][1] >> 16) + (digits[1][0] >> 16) + (middle >> 16)
    start = i * n
    shape = (rows.shape[0], columns)
    start = jnp.broadcast_to(start, shape)
    low = start + jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    return jnp.broadcast_to(high, shape) + (low < start).astype(jnp.uint32), low


def _threefry(key0: Array, key1: Array, x0: Array, x1: Array) -> tuple[Array, Array]:
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0
        x0, x1 = x0 + keys[(group + 1) % 3], x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1
