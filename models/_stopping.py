"""Ctrl-C for programs that keep what they have done."""

import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass
class Stop:
    """**Attributes:** `is_set`, whether the user has asked for the end."""

    is_set: bool = False


@contextlib.contextmanager
def stopping() -> Iterator[Stop]:
    """Let Ctrl-C and SIGTERM wait for the end of a step, in the middle of which no state is whole. A second one does not wait."""
    stop = Stop()

    def ask(*_: Any) -> None:
        if stop.is_set:
            raise KeyboardInterrupt
        stop.is_set = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
