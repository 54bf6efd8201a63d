"""Messages of a program beside its results: on stderr, which may be closed."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

from tqdm import tqdm


def report(text: str) -> None:
    if sys.stderr is not None:  # else `print` would take stdout
        print(text, file=sys.stderr)


def fail(message: str) -> int:
    """Say what was wrong, in one line. Returns the exit code."""
    report(f"generate: error: {message}")
    return 2


def progress(description: str, unit: str, total: int | None = None) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """A progress bar around an iteration, gone after it. `total` is how long that is, where it has no length."""

    def wrap(items: Iterable[Any]) -> Iterable[Any]:
        if sys.stderr is None:
            return items
        return tqdm(items, desc=description, unit=unit, total=total, leave=False, file=sys.stderr)

    return wrap


def write_line(text: str) -> None:
    """Write to stdout, beside a progress bar."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()
