"""The calls that this family's handlers take, by names that begin with their symbol, and the calls that they refuse."""

import numpy as np

from ..handled import a, i32


ROWS = {"row_rank": np.int64(1)}

HANDLED = {
    "cache_append": ([a(2, 7, 3), a(2, 1, 3), i32()], a(2, 7, 3), ROWS),
}
NOT_HANDLED = [
    ("cache_append", [a(7, 3), a(1, 3), i32()], a(7, 3), {"row_rank": np.int64(-1)}, r"expected row_rank of 0 or more"),
    ("cache_append", [a(7, 3), a(1, 3), i32()], a(7, 3), {"row_rank": np.int64(2)}, r"cache with at least 3 axes"),
    ("cache_append", [a(7, 3), a(1, 3), i32()], a(7, 3), {"row_rank": np.int64(2**63 - 1)}, r"cache with at least"),
    ("cache_append", [a(7, 3), a(3), i32()], a(7, 3), ROWS, r"rows with at least 2 axes"),
    ("cache_append", [a(7, 3), a(1, 3), i32()], a(7, 4), ROWS, r"a result of the type of cache"),
    ("cache_append", [a(7, 3), a(1, 4), i32()], a(7, 3), ROWS, r"rows that fit into the cache of shape \(7, 3\); got"),
    ("cache_append", [a(7, 3), a(8, 3), i32()], a(7, 3), ROWS, r"rows that fit into the cache"),
    ("cache_append", [a(7, 3), i32(1, 3), i32()], a(7, 3), ROWS, r"rows that fit into the cache"),
    ("cache_append", [a(2, 7, 3), a(1, 3), i32()], a(2, 7, 3), ROWS, r"rows that fit into the cache"),
    ("cache_append", [a(7, 3), a(2, 1, 3), i32()], a(7, 3), ROWS, r"rows that fit into the cache"),
    ("cache_append", [a(7, 3), a(1, 3), a()], a(7, 3), ROWS, r"position of int32"),
    ("cache_append", [a(7, 3), a(1, 3), i32(2)], a(7, 3), ROWS, r"a position for each cache; got the shape \(2\)"),
    ("cache_append", [a(7, 3), a(1, 3), i32()], a(7, 3), ROWS, r"the result in the memory of the cache"),
]
