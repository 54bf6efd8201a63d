"""Embeddings: from a request of HTTP to an embedder, and back."""

import asyncio
import concurrent.futures
import time

import numpy as np
from starlette.requests import ClientDisconnect, Request as HttpRequest
from starlette.responses import Response

from ..embedder import Embedder, Tokens
from . import replies
from .errors import ApiError, json_response, overloaded
from .requests import EmbeddingRequest


# So many texts are embedded in one go. Between two of them others take their turn.
_SLICE = 64


class Embeddings:
    """A model that makes vectors of texts, in a thread of its own.

    **Arguments:**

    - `name`: of the model.
    - `embedder`: which makes the vectors.
    - `max_queue`: how many requests may wait.
    - `timeout`: seconds for a request, with the time that it waits.
    """

    def __init__(self, name: str, embedder: Embedder, *, max_queue: int, timeout: float):
        self.name = name
        self._embedder = embedder
        self._max_requests = 1 + max_queue
        self._num_requests = 0
        self._timeout = timeout
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "embedder")

    async def embed(self, http: HttpRequest, asked: EmbeddingRequest) -> Response:
        """**Raises:** `ApiError`, and `ClientDisconnect` if nobody waits any more."""
        if asked.dimensions not in (None, self._embedder.size):
            message = f"dimensions: expected {self._embedder.size}, the size of all vectors; got {asked.dimensions}."
            raise ApiError(message, param="dimensions")
        if self._num_requests >= self._max_requests:
            raise overloaded("the server: expected fewer requests at a time; the queue is full. Try again later.")
        self._num_requests += 1
        try:
            vectors, num_tokens = await self._vectors(http, asked.inputs)
        finally:
            self._num_requests -= 1
        return json_response(replies.embeddings(self.name, vectors, num_tokens, in_base64=asked.in_base64))

    async def _vectors(self, http: HttpRequest, texts: list[str]) -> tuple[np.ndarray, int]:
        loop, deadline = asyncio.get_running_loop(), time.monotonic() + self._timeout
        tokens: Tokens = await loop.run_in_executor(self._thread, self._embedder.tokenize, texts)
        if tokens.cut:
            message = f"input: expected at most {self._embedder.max_tokens} tokens each; {tokens.cut} of {len(texts)} have more."
            raise ApiError(f"{message} Shorten them.", param="input", code="context_length_exceeded")
        # Alike lengths together, as padding costs time.
        order = np.argsort([len(sentence) for sentence in tokens.sentences], kind="stable")
        vectors = np.empty((len(texts), self._embedder.size), np.float32)
        for start in range(0, len(texts), _SLICE):
            if await http.is_disconnected():
                raise ClientDisconnect
            if time.monotonic() > deadline:
                raise overloaded(
                    "the server: expected to embed the input within the time limit. Send less, or try again later."
                )
            part = order[start : start + _SLICE]
            sentences = [tokens.sentences[i] for i in part]
            vectors[part] = await loop.run_in_executor(self._thread, self._embedder.embed, sentences)
        return vectors, sum(map(len, tokens.sentences))
