"""Chat completions and completions: from a request of HTTP to the engine, and back."""

import asyncio
import concurrent.futures
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from .._errors import ModelFileError
from ..decoding.answer import Answer
from ..decoding.batch import Request
from ..decoding.scores import Score
from ..tokens.tokenizer import TextTooLong, Tokenizer
from .engine import Engine, EngineClosed, QueueFull
from .errors import ApiError, json_response, overloaded, shutting_down
from .events import Events, Stream
from .logprobs import form_of
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
        choices = asked.choices
        self._check_tokens("logit_bias", choices[0].bias.of_tokens)
        try:
            with self.engine.place(len(choices)):
                # In a thread: a long prompt takes a while, in which other answers go on.
                encode = lambda: [self._encode(prompt, is_chat=is_chat) for prompt in asked.prompts]
                encoding = asyncio.get_running_loop().run_in_executor(self._encoders, encode)
                prompts = await unless_set(closing, encoding)
                max_tokens = self.engine.room if asked.max_tokens is None else asked.max_tokens
                requests = [
                    Request(
                        prompt,
                        self._new_answer(asked, prompt, is_chat=is_chat),
                        max_tokens,
                        choice,
                        asked.top_logprobs,
                        scores_prompt=asked.echo and asked.top_logprobs is not None,
                    )
                    for prompt, choice in zip(_repeated(prompts, len(choices)), choices, strict=True)
                ]
                events = Events(self.engine, requests, http, deadline)
        except QueueFull:
            raise self._no_place(asked) from None
        except EngineClosed:
            raise shutting_down() from None
        reply = Reply(
            self.name,
            sum(map(len, prompts)),
            is_chat=is_chat,
            include_usage=asked.include_usage,
            logprobs=None if asked.top_logprobs is None else form_of(self._tokenizer, is_chat=is_chat),
        )
        scores: list[list[tuple[int, Score]]] = [[] for _ in choices]
        try:
            item = await events.next()
            # Not before the first event: until then an error can have a status of its own.
            if asked.stream:
                return Stream(events, item, reply)
            while item is not None:
                i, event = item
                scores[i] += event.scores
                item = await events.next()
        except BaseException:  # the server may cancel this as well
            events.close()
            raise
        events.close()
        return json_response(reply.whole(events.answers, scores))

    def _no_place(self, asked: AnswerRequest) -> ApiError:
        most, count = self.engine.capacity, len(asked.choices)
        if count > most:  # also when nobody else is there
            name = "n" if len(asked.prompts) == 1 else "prompt"
            message = f"{name}: expected at most {most}, the answers that this server makes or lets wait; got {count}. "
            return ApiError(message + "Ask for fewer, or start it with a larger --max-queue.", param=name)
        return overloaded("the server: expected fewer requests at a time; the queue is full. Try again later.")

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


def _repeated(prompts: Sequence[list[int]], count: int) -> Iterator[list[int]]:
    """Each prompt as often as it has choices, which are `count` in all."""
    return (prompt for prompt in prompts for _ in range(count // len(prompts)))
