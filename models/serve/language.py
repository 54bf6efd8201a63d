"""Chat completions and completions: from a request of HTTP to the engine, and back."""

import asyncio
import concurrent.futures
import functools
import time
from collections.abc import AsyncIterator, Collection
from typing import Any

from starlette.requests import ClientDisconnect, Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .._errors import ModelFileError
from ..decoding.answer import Answer
from ..decoding.batch import Request
from ..tokens.tokenizer import TextTooLong, Tokenizer
from . import replies
from .engine import Engine, EngineClosed, Event, QueueFull
from .errors import ApiError, json_response, overloaded, shutting_down
from .replies import Reply
from .requests import AnswerRequest
from .waiting import unless_set


# Several prompts become tokens at a time, so that short ones do not wait for all long ones.
_NUM_ENCODERS = 4


class Language:
    """A language model that answers.

    **Arguments:**

    - `name`: of the model.
    - `engine`: which makes the answers.
    - `tokenizer`: of the model.
    - `timeout`: seconds for an answer, with the time that its request waits.
    """

    def __init__(self, name: str, engine: Engine, tokenizer: Tokenizer, *, timeout: float):
        self.name = name
        self.engine = engine
        self._tokenizer = tokenizer
        self._timeout = timeout
        self._max_tokens = engine.room - 1  # of a prompt
        self._max_bytes = self._max_tokens * tokenizer.longest
        # Not asyncio's own threads, for which the end of the loop waits.
        self._encoders = concurrent.futures.ThreadPoolExecutor(_NUM_ENCODERS, "tokenizer")

    async def answer(
        self, http: HttpRequest, asked: AnswerRequest, *, is_chat: bool, closing: asyncio.Event | None = None
    ) -> Response:
        """Answer a request.

        **Arguments:**

        - `closing`: set when the server shuts down.

        **Raises:** `ApiError`, and `ClientDisconnect` if nobody waits any more.
        """
        deadline = time.monotonic() + self._timeout
        self._check_tokens("logit_bias", asked.choice.bias.of_tokens)
        try:
            with self.engine.place():
                # In a thread: a long prompt takes a while, in which other answers go on.
                encode = functools.partial(self._encode, asked.prompt, is_chat=is_chat)
                encoding = asyncio.get_running_loop().run_in_executor(self._encoders, encode)
                prompt = await unless_set(closing, encoding)
                answer = self._new_answer(asked, prompt, is_chat=is_chat)
                max_tokens = self.engine.room if asked.max_tokens is None else asked.max_tokens
                request = Request(prompt, answer, max_tokens, asked.choice)
                events = _Events(self.engine, request, http, deadline)
        except QueueFull:
            message = "the server: expected fewer requests at a time; the queue is full. Try again later."
            raise overloaded(message) from None
        except EngineClosed:
            raise shutting_down() from None
        reply = Reply(self.name, len(prompt), is_chat=is_chat, echoed=answer.echoed, include_usage=asked.include_usage)
        try:
            event = await events.next()
            # Not before the first event: until then an error can have a status of its own.
            if asked.stream:
                return _Stream(events, event, reply)
            while event.finish is None:
                event = await events.next()
        except BaseException:  # the server may cancel this as well
            events.close()
            raise
        events.close()
        return json_response(reply.whole(answer))

    def _new_answer(self, asked: AnswerRequest, prompt: list[int], *, is_chat: bool) -> Answer:
        if asked.echo:
            return Answer(self._tokenizer, asked.stop, echo=prompt)
        # A completion goes on with its prompt, if that has any text: the two are to be joined.
        continues = not is_chat and any(map(self._tokenizer.piece, prompt))
        return Answer(self._tokenizer, asked.stop, continues=continues)

    def _encode(self, prompt: Any, *, is_chat: bool) -> list[int]:
        name, most = "messages" if is_chat else "prompt", self._max_bytes
        try:
            if is_chat:
                tokens = self._tokenizer.encode_chat(prompt, max_bytes=most)
            else:
                tokens = self._tokenizer.encode(prompt, max_bytes=most) if isinstance(prompt, str) else prompt
        except ModelFileError as error:
            raise ApiError(f"{name}: {error}", param=name) from None
        except TextTooLong as error:
            raise self._too_long(name, error) from None
        if not tokens:
            raise ApiError(f"{name}: expected at least one token; got none.", param=name)
        self._check_tokens(name, tokens)
        if len(tokens) > self._max_tokens:
            raise self._too_long(name, len(tokens))
        return tokens

    def _check_tokens(self, name: str, tokens: Collection[int]) -> None:
        last = self._tokenizer.vocab_size - 1
        if tokens and not 0 <= min(tokens) <= max(tokens) <= last:
            raise ApiError(f"{name}: expected tokens from 0 to {last}; got others.", param=name)

    def _too_long(self, name: str, got: object) -> ApiError:
        message = (
            f"{name}: expected less than {self.engine.room} tokens, with room for an answer; got {got}. Shorten it."
        )
        return ApiError(message, param=name, code="context_length_exceeded")


class _Events:
    """The events of one answer, as the server's loop awaits them. When the client goes away, they end."""

    def __init__(self, engine: Engine, request: Request, http: HttpRequest, deadline: float):
        self.request = request
        self._engine = engine
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()
        deliver = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, self._queue.put_nowait)
        engine.submit(request, deliver, deadline)
        self._watch = asyncio.create_task(self._tell_when_gone(http))

    async def next(self) -> Event:
        """**Raises:** `ApiError` if the answer ends without being one, and `ClientDisconnect`."""
        event = await self._queue.get()
        if event is None:
            raise ClientDisconnect
        if event.finish == "interrupted":
            if not event.text:
                raise shutting_down()
            # First the text that was held back; then the end, which is an error.
            self._queue.put_nowait(Event("", "interrupted"))
            return Event(event.text, None)
        if event.finish == "time" and self.request.answer.num_tokens == 0:
            raise overloaded("the server: expected to begin in time; other requests came first. Try again later.")
        return event

    def close(self) -> None:
        """Free the answer's row. The events may have ended."""
        self._watch.cancel()
        self._engine.cancel(self.request)

    async def _tell_when_gone(self, http: HttpRequest) -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(None)


class _Stream(StreamingResponse):
    """A response of server-sent events."""

    def __init__(self, events: _Events, event: Event, reply: Reply):
        super().__init__(
            self._chunks(event, reply), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._events.close()

    async def _chunks(self, event: Event, reply: Reply) -> AsyncIterator[str]:
        if reply.first:
            yield reply.first
        try:
            while True:
                if event.text:
                    yield reply.piece(event.text)
                if event.finish is not None:
                    break
                event = await self._events.next()
            yield reply.last(self._events.request.answer)
        except ApiError as error:
            yield replies.event(error.body)
        except ClientDisconnect:
            pass
