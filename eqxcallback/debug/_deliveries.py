"""Calls of tap functions: at once, or by a thread of their own that takes them from a bounded queue."""

import collections
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from . import _failures


class Delivery(NamedTuple):
    number: int
    name: str
    nbytes: int
    call: Callable[[], None]


class Deliveries:
    """All calls of tap functions that were begun, and are not over."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._open: dict[int, str] = {}
        self._queue: collections.deque[Delivery] = collections.deque()
        self._queued_bytes = 0
        self._worker: threading.Thread | None = None
        self._limit = 0
        self._stopping = False
        self._closed = False
        self._inside = threading.local()

    def call_now(self, name: str, call: Callable[[], None]) -> None:
        """Call in this thread. An exception is kept, unless it stops the program."""
        with self._delivery(name) as number:
            self._run(Delivery(number, name, 0, call), Exception)

    def call_later(self, name: str, call: Callable[[], None], nbytes: int) -> None:
        """Call in the worker's thread. Waits while the queue is full."""
        with self._delivery(name, closes=False) as number:
            delivery = Delivery(number, name, nbytes, call)
            with self._changed:
                # The worker may not wait for itself. What is larger than the queue goes alone.
                while (has_worker := self._start_worker()) and self._is_full(nbytes):
                    self._changed.wait()
                if has_worker:
                    self._queue.append(delivery)
                    self._queued_bytes += nbytes
                    self._changed.notify_all()
                    return
            self._run(delivery, Exception)
            self._close(number)

    def wait(self, timeout: float | None) -> str | None:
        """Wait for all calls that were begun before. Return what is missing after `timeout` seconds, or `None`."""
        with self._changed:
            begun = set(self._open)
            if self._changed.wait_for(lambda: not begun & self._open.keys(), timeout):
                return None
            counts = collections.Counter(name for number, name in self._open.items() if number in begun)
            names = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
            return f"{sum(counts.values())} calls of tap functions: {names}; {self._queued_bytes} bytes are queued"

    def stop(self) -> None:
        """End the worker when the queue is empty. The next call starts another one."""
        with self._changed:
            worker = self._worker
            self._stopping = worker is not None
            self._changed.notify_all()
        if worker is not None and worker is not threading.current_thread():
            worker.join()

    def close(self) -> None:
        """Call everything at once from now on: Python exits."""
        with self._changed:
            self._closed = True

    def is_inside(self) -> bool:
        """True if a tap function is asking."""
        return getattr(self._inside, "depth", 0) > 0

    @contextlib.contextmanager
    def _delivery(self, name: str, *, closes: bool = True) -> Iterator[int]:
        """Open within this context; and after it, if somebody else closes it, unless it ends in an error."""
        with self._changed:
            number = next(self._numbers)
            self._open[number] = name
        try:
            yield number
        except BaseException:
            closes = True
            raise
        finally:
            if closes:
                self._close(number)

    def _is_full(self, nbytes: int) -> bool:
        inside = threading.current_thread() is self._worker
        return bool(self._queue) and self._queued_bytes + nbytes > self._limit and not inside

    def _close(self, number: int) -> None:
        with self._changed:
            self._open.pop(number, None)
            self._changed.notify_all()

    def _run(self, delivery: Delivery, caught: type[BaseException]) -> None:
        self._inside.depth = getattr(self._inside, "depth", 0) + 1
        try:
            delivery.call()
        except caught as error:
            _failures.record(error, delivery.name)
        finally:
            self._inside.depth -= 1

    def _start_worker(self) -> bool:
        """Start the worker unless there is one, and return whether there is. Python starts no threads while it exits."""
        if self._closed:
            return False
        if self._worker is None:
            self._limit = queue_limit()
            worker = threading.Thread(target=self._work, name="eqxcallback-taps", daemon=True)
            try:
                worker.start()
            except RuntimeError:
                return False
            self._worker = worker
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if not self._queue:
                    self._worker, self._stopping = None, False
                    return
                delivery = self._queue[0]
            try:
                self._run(delivery, BaseException)
            finally:
                with self._changed:
                    self._queue.popleft()
                    self._queued_bytes -= delivery.nbytes
                self._close(delivery.number)
                del delivery  # its arrays


def queue_limit() -> int:
    """Return the limit of the queue in bytes."""
    text = os.environ.get("EQXCALLBACK_TAP_QUEUE_BYTES", "256000000")
    try:
        limit = int(text)
    except ValueError:
        limit = 0
    if limit <= 0:
        raise ValueError(
            f"eqxcallback.debug: expected EQXCALLBACK_TAP_QUEUE_BYTES to be a positive number of bytes; got {text!r}."
        )
    return limit


_current = Deliveries()


def deliveries() -> Deliveries:
    """Return the deliveries of this process."""
    return _current


def _in_child() -> None:
    """Start anew after a fork: threads, and what they were to call, are the parent's."""
    global _current
    _current = Deliveries()
    _failures.forget()


os.register_at_fork(after_in_child=_in_child)
