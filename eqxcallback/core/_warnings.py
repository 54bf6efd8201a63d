"""Hints at what is right and slower than it needs to be."""

import contextlib
import contextvars
import functools
import sys
import warnings
from collections.abc import Iterator


# Their frames are not where somebody who reads the warning can change anything.
_PACKAGES = ("eqxcallback", "jax", "jaxtyping", "beartype", "equinox", "contextlib", "functools")


class PerformanceWarning(UserWarning):
    """A call that is right, and slower than it needs to be: `vmap` calls a kernel for each example because its layer states no
    `vmap_method`, or another kernel or the reference runs because a package is missing.

    The text says what to change. Each one is said once in a process, and never by [`eqxcallback.inspect`][], whose table has it.
    """


_is_quiet = contextvars.ContextVar("_is_quiet", default=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold warnings back: nothing is said inside, and what was not said may be said later."""
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


def is_quiet() -> bool:
    return _is_quiet.get()


def warn_once(text: str) -> None:
    if not is_quiet():
        _warn(text)


# Where a filter makes the warning an error, it is raised each time: a cache keeps no exception.
@functools.lru_cache(maxsize=4096)
def _warn(text: str) -> None:
    warn(text, PerformanceWarning)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """A warning at the line that called us, however deep in us and in decorators it is noticed."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
