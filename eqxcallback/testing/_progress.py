"""Report progress while a check runs."""

import sys

from ._report import Row


_SLOW = 1.0  # seconds


class Progress:
    """**Arguments:** `wanted`: of every row; `None` is of slow ones, if somebody looks on."""

    def __init__(self, wanted: bool | None):
        self._is_shown = sys.stderr.isatty() if wanted is None else wanted
        self._shortest = _SLOW if wanted is None else 0.0

    def row(self, row: Row) -> Row:
        if self._is_shown and row.seconds >= self._shortest:
            print(f"check: {row.name}: {row.result}, {row.seconds:.1f} s", file=sys.stderr, flush=True)
        return row
