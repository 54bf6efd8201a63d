"""The thread that makes the answers of all requests."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..decoding.answer import Finish
from ..decoding.batch import Batch, Request
from .logprobs import Scores


class Event(NamedTuple):
    """A piece of an answer.

    **Attributes:**

    - `text`: to be added.
    - `finish`: why it ended, or `None`: more events come.
    - `scores`: of `Answer.pop_scores`.
    """

    text: str
    finish: Finish | None
    scores: Scores = ()


@dataclasses.dataclass(eq=False)
class Job:
    """A request, and who waits for its answer."""

    request: Request
    deliver: Callable[[Event], object]
    deadline: float


class QueueFull(Exception):
    """Raised by `Engine.place` when as many requests wait as may."""


class EngineClosed(Exception):
    """Raised by `Engine.place` and `Engine.submit` when no more answers are made."""


class Engine:
    """Makes answers in a thread of its own, which alone uses the batch.

    A turn reads a chunk of a prompt, if one waits, and makes a token of each answer that has a row. Between turns requests come
    and go.

    **Arguments:**

    - `batch`: with `rows` rows at most.
    - `max_queue`: how many requests may wait for a row.
    - `on_end`: called in the thread at its end, of whatever kind.

    **Attributes:**

    - `room`: of a prompt and its answer, in tokens.
    - `capacity`: how many requests there may be, with those that wait.
    - `error`: what ended the thread, if a mistake of ours did.
    """

    def __init__(self, batch: Batch, *, rows: int, max_queue: int, on_end: Callable[[], object] = lambda: None):
        self.room = batch.room
        self.error: Exception | None = None
        self._batch = batch
        self.capacity = rows + max_queue
        self._on_end = on_end
        self._changed = threading.Condition()
        # All that follows is used with the lock.
        self._coming = 0  # places of requests that are not submitted yet
        self._jobs: dict[Request, Job] = {}
        self._arrived: list[Request] = []
        self._cancelled: list[Request] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def num_requests(self) -> int:
        """Return how many requests have no end yet."""
        with self._changed:
            return self._coming + len(self._jobs)

    @contextlib.contextmanager
    def place(self, count: int = 1) -> Iterator[None]:
        """Keep places for some requests until the context ends, in which `submit` takes them.

        A prompt may take long to become tokens, so the place is asked for first: a full queue refuses at once.

        **Raises:** `QueueFull` and `EngineClosed`.
        """
        with self._changed:
            if self._closed:
                raise EngineClosed
            if self._coming + len(self._jobs) + count > self.capacity:
                raise QueueFull
            self._coming += count
        try:
            yield
        finally:
            with self._changed:
                self._coming -= count

    def submit(self, request: Request, deliver: Callable[[Event], object], deadline: float) -> None:
        """Take a request, in a context of `place`.

        **Arguments:**

        - `request`: whose prompt has from 1 to `room - 1` tokens.
        - `deliver`: called in the engine's thread with each event, until one has a `finish`.
        - `deadline`: the time of `time.monotonic` at which the answer ends, or, if it has no token yet, begins no more. Its
            finish is `"time"` then.

        **Raises:** `EngineClosed`.
        """
        with self._changed:
            if self._closed:
                raise EngineClosed
            self._jobs[request] = Job(request, deliver, deadline)
            self._arrived.append(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Let a request, which may have ended, get no more events, and give its row to others."""
        with self._changed:
            if self._jobs.pop(request, None) is not None:
                self._cancelled.append(request)
                self._changed.notify()

    def stop(self) -> None:
        """End all answers, with the finish `"interrupted"`, and take no more requests. The thread may take a turn to do so."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def close(self) -> None:
        """Stop, and wait for the end of the thread."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._exchange():
                self._drop_late()
                for turn in (self._batch.read, self._batch.decode):
                    for request, text in turn():
                        self._deliver(request, text)
        except Exception as error:
            self.error = error
        with self._changed:
            self._closed = True
            requests = list(self._jobs)
        for request in requests:
            self._end(request, "interrupted")
        self._on_end()

    def _exchange(self) -> bool:
        """Hand on what has come since the last turn; wait if there is nothing to do. Returns whether there is a next turn."""
        with self._changed:
            while not (self._closed or self._arrived or self._cancelled or self._batch.is_busy):
                self._changed.wait()
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            closed = self._closed
        for request in arrived:
            self._batch.add(request)
        for request in cancelled:
            self._batch.cancel(request)
        return not closed

    def _drop_late(self) -> None:
        now = time.monotonic()
        with self._changed:
            late = [request for request, job in self._jobs.items() if job.deadline < now]
        for request in late:
            self._batch.cancel(request)
            self._end(request, "time")

    def _end(self, request: Request, finish: Finish) -> None:
        answer = request.answer
        self._deliver(request, answer.end(finish) if answer.finish is None else "")

    def _deliver(self, request: Request, text: str) -> None:
        finish = request.answer.finish
        with self._changed:
            job = self._jobs.get(request) if finish is None else self._jobs.pop(request, None)
        if job is not None:
            job.deliver(Event(text, finish, request.answer.pop_scores()))
