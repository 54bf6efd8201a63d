"""What a program says beside its results: on stderr, which may be closed."""

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


def progress(description: str, unit: str) -> Callable[[Iterable[Any]], Iterable[Any]]:
    """A progress bar around an iteration, gone after it."""

    def wrap(items: Iterable[Any]) -> Iterable[Any]:
        if sys.stderr is None:
            return items
        return tqdm(items, desc=description, unit=unit, leave=False, file=sys.stderr)

    return wrap
