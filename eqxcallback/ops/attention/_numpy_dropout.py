"""The weights that dropout keeps: those that `jax.random.bernoulli` keeps, of Threefry's keys."""

import math

import numpy as np

from .._numpy import XpArray


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def kept(keys: XpArray, rows: XpArray, columns: XpArray, width: int, dropout: float) -> XpArray:
    """Return which weights are kept at these rows and columns, in rows of `width`. `keys` has two words along its last axis."""
    index = rows.astype(np.uint64)[:, None] * np.uint64(width) + columns.astype(np.uint64)
    high, low = (index >> np.uint64(32)).astype(np.uint32), index.astype(np.uint32)
    left, right = _threefry(keys[..., 0, None, None], keys[..., 1, None, None], high, low)
    return (left ^ right) >> 9 < math.ceil(float(np.float32(1 - dropout)) * 2**23)


def _threefry(key0: XpArray, key1: XpArray, x0: XpArray, x1: XpArray) -> tuple[XpArray, XpArray]:
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0
        x0, x1 = x0 + keys[(group + 1) % 3], x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1
