"""Events from the engine for one request of HTTP, and the stream that is made of them."""

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence

from starlette.requests import ClientDisconnect, Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..decoding.batch import Request
from . import replies
from .engine import Engine, Event
from .errors import ApiError, overloaded, shutting_down
from .replies import Reply


# The index of a choice, and its event.
_Item = tuple[int, Event]


class Events:
    """The events of the answers to one request, as the server's loop awaits them. When the client goes away, they end.

    **Arguments:**

    - `requests`: one for each choice.

    **Raises:** `EngineClosed`.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], http: HttpRequest, deadline: float):
        self.answers = [request.answer for request in requests]
        self._engine = engine
        self._requests = requests
        self._num_open = len(requests)
        self._is_interrupted = False
        self._queue: asyncio.Queue[_Item | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(i: int, event: Event) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, (i, event))

        for i, request in enumerate(requests):
            engine.submit(request, functools.partial(deliver, i), deadline)
        self._watch = asyncio.create_task(self._tell_when_gone(http))

    async def next(self) -> _Item | None:
        """Return the next event, or `None` after the end of all answers.

        **Raises:** `ApiError` if they end without being ones, and `ClientDisconnect`.
        """
        while self._num_open:
            item = await self._queue.get()
            if item is None:
                raise ClientDisconnect
            i, event = item
            self._num_open -= event.finish is not None
            if event.finish == "time" and not any(answer.num_tokens for answer in self.answers):
                raise overloaded("the server: expected to begin in time; other requests came first. Try again later.")
            if event.finish != "interrupted":
                return item
            # First the text that was held back; then the end, which is an error.
            self._is_interrupted = True
            if event.text:
                return i, event._replace(finish=None)
        if self._is_interrupted:
            raise shutting_down()
        return None

    def close(self) -> None:
        """Free the rows of the answers. The events may have ended."""
        self._watch.cancel()
        for request in self._requests:
            self._engine.cancel(request)

    async def _tell_when_gone(self, http: HttpRequest) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(None)


class Stream(StreamingResponse):
    """A response of server-sent events.

    **Arguments:**

    - `item`: the first of the events, which has been awaited.
    """

    def __init__(self, events: Events, item: _Item | None, reply: Reply):
        super().__init__(
            self._chunks(item, reply), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._events.close()

    async def _chunks(self, item: _Item | None, reply: Reply) -> AsyncIterator[str]:
        answers = self._events.answers
        for i, answer in enumerate(answers):
            if first := reply.first(i, answer):
                yield first
        try:
            while item is not None:
                i, event = item
                if event.text or event.scores:
                    yield reply.piece(i, event.text, event.scores)
                if event.finish is not None:
                    yield reply.end(i, event.finish)
                item = await self._events.next()
            yield reply.last(answers)
        except ApiError as error:
            yield replies.event(error.body)
        except ClientDisconnect:
            pass
