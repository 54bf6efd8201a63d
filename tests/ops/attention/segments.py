"""Segments of queries and of keys, in order and in none, of as many rows as a test has."""

from typing import Any

import numpy as np


_EDGES = np.iinfo(np.int32)


def documents(*lengths: int) -> np.ndarray:
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)


def segments(rows: int, block: int) -> dict[str, Any]:
    """Ids of both, or a pair. Where a kernel has blocks of `block` rows, some lie within a segment, and some begin or end one."""
    random = np.random.default_rng(5)
    parts = -(-rows // block)
    assert parts >= 4
    return {
        "documents": documents(block // 3, 2 * block + block // 2, 1, rows - 2 * block - block // 2 - block // 3 - 1),
        "as long as blocks": documents(2 * block, block, rows - 3 * block),
        "one": np.full(rows, 7, np.int32),
        "in no order": random.integers(0, 3, rows).astype(np.int32),
        "in blocks of no order": np.repeat(random.permutation(parts), block)[:rows].astype(np.int32),
        "one apart": np.where(np.arange(rows) % (3 * block) == block + 4, 1, 0).astype(np.int32),
        "each of its own": np.arange(rows, dtype=np.int32)[::-1].copy(),
        "extremes": np.where(np.arange(rows) < rows // 2, _EDGES.min, _EDGES.max).astype(np.int32),
        "keys of others": (documents(rows // 2, rows - rows // 2), documents(rows // 5, rows - rows // 5) + 1),
        "no keys": (documents(rows // 2, rows - rows // 2), documents(rows // 5, rows - rows // 5) + 9),
    }
