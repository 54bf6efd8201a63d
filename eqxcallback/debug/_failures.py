"""Exceptions of functions that watch a program: logged at once, and kept until somebody waits."""

import logging
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from ..core import from_the_user


_logger = logging.getLogger("eqxcallback")
_lock = threading.Lock()
_most = 1000
_kept: list[Exception] = []
_left_out = 0
_last = ""


class CallbackException(ExceptionGroup):
    """The exceptions of tap functions since the last [`eqxcallback.debug.barrier_wait`][], in `exceptions`."""

    def derive(self, excs: Sequence[Any]) -> Any:  # as `split` and `except*` want it
        return CallbackException(self.message, excs)


def record(error: BaseException, name: str) -> None:
    """Log `error`, which the function of that name raised, and keep it."""
    global _left_out, _last
    error = from_the_user(error)
    text = "".join(traceback.format_exception(error)).rstrip()
    _logger.error("the tap function %s failed; the program goes on\n%s", name, text)
    traceback.clear_frames(error.__traceback__)  # they hold arrays
    if not isinstance(error, Exception):
        wrapped = RuntimeError(f"{name} raised {type(error).__name__}, which stops no program from another thread")
        wrapped.__cause__ = error
        error = wrapped
    with _lock:
        _last = text
        if len(_kept) < _most:
            _kept.append(error)
        else:
            _left_out += 1


def raise_kept() -> None:
    """Raise what was kept, and forget it."""
    global _left_out
    with _lock:
        exceptions, left_out, last = _kept[:], _left_out, _last
        _kept.clear()
        _left_out = 0
    if exceptions:
        more = f" ({left_out} more are in the log.)" if left_out else ""
        message = f"There were exceptions during callback processing.{more} Last one was: {last}"
        raise CallbackException(message, exceptions) from exceptions[-1]


def forget() -> None:
    """Forget the failures in a forked process: they are the parent's."""
    global _lock, _left_out
    _lock = threading.Lock()
    _kept.clear()
    _left_out = 0
