"""Answers to many prompts, several of which are decoded at a time."""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from .answer import Answer
from .chooser import Choice, Chooser
from .generator import Speed
from .reader import LONGEST_CHUNK, SHORTEST_CHUNK, Model, Reader
from .rows import Rows
from .scores import Score, Scorer


# After so many steps that fewer rows would have had room for, there are fewer: to move rows takes as long as a few steps.
_PATIENCE = 16


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, and the answer that is made to it.

    **Attributes:**

    - `prompt`: tokens.
    - `answer`: takes the tokens that follow, until it has an end.
    - `max_tokens`: the most tokens of the answer. They are fewer where the room ends.
    - `choice`: how tokens are chosen.
    - `top_logprobs`: how many of the likeliest tokens each score of the answer has, or `None` for an answer without scores. For
        a model on one device.
    - `scores_prompt`: whether the answer, which echoes its prompt, gets scores of the prompt's tokens as well.
    """

    prompt: Sequence[int]
    answer: Answer
    max_tokens: int
    choice: Choice = dataclasses.field(default_factory=Choice)
    top_logprobs: int | None = None
    scores_prompt: bool = False


# A request, and the text that its answer has got.
Piece = tuple[Request, str]


@dataclasses.dataclass
class _Reading:
    """A prompt that is being read."""

    request: Request
    chunks: collections.deque[Sequence[int]]
    scores: list[Score]  # of the prompt


@dataclasses.dataclass
class _Row:
    """An answer that is being made."""

    request: Request
    token: int  # the last one, which is not in the cache
    length: int  # of what is


class Batch:
    """Generates after many prompts. One program makes the next tokens of all rows, which reads the weights once.

    Prompts are read one after the other, each as if alone. Its cache becomes a row of the batch's, and when its answer ends, the
    next prompt takes the row. What a prompt has in common with the one before, such as the system message, is not read again.

    Requests may come and go at any time; one thread at a time uses a batch.

    **Arguments:**

    - `model`: a `Llama`, a `SplitLlama` or a `SequenceLlama`.
    - `widths`: the numbers of rows that it may have, the least first. It has as many as it needs.
    - `room`: for how many tokens a row is; the model's context, if that is less.
    - `longest_chunk`: the most tokens that `read` reads.

    **Attributes:**

    - `room`: for how many tokens there is room.
    - `speed`: what all took so far.
    """

    def __init__(self, model: Model, *, widths: Sequence[int], room: int, longest_chunk: int = LONGEST_CHUNK):
        self.speed = Speed()
        self._reader = Reader(model, room, longest_chunk)
        self.room = self._reader.room
        self._chooser = Chooser(model.config.vocab_size, sharding=model.logits_sharding)
        self._caches = Rows(model, self._reader.shapes)
        self._scorer = Scorer(model.config.vocab_size)
        self._is_split = model.logits_sharding is not None
        self._widths = widths
        self._waiting: collections.deque[Request] = collections.deque()
        self._reading: _Reading | None = None
        self._starting: _Row | None = None  # whose cache is the reader's: its first token need not wait for a row
        self._rows: list[_Row | None] = []
        self._idle_steps = 0

    @property
    def is_busy(self) -> bool:
        """True if there is a request."""
        return bool(self._waiting) or self._reading is not None or self._count > 0

    @property
    def can_read(self) -> bool:
        """True if a prompt waits, and there may be a row for it."""
        return self._reading is not None or (bool(self._waiting) and self._count < self._widths[-1])

    def programs(self) -> list[Callable[[], object]]:
        """The programs of all widths and chunks, and of the moves between widths, as functions that compile them."""
        caches = self._caches
        widths = (functools.partial(make, width) for width in self._widths for make in (caches.programs, caches.empty))
        moves = (functools.partial(caches.moves, *pair) for pair in itertools.permutations(self._widths, 2))
        counts = () if self._is_split else {1, *self._widths, SHORTEST_CHUNK}
        scores = [functools.partial(self._scorer.prepare, count) for count in counts]
        of_prompts = [] if self._is_split else [self._reader.prepare_logits]
        return [*self._reader.programs(), self._chooser.prepare, *widths, *moves, *scores, *of_prompts]

    def add(self, request: Request) -> None:
        """Take a request.

        **Raises:** `ValueError` for a prompt that is empty, or leaves no room for a token, and for scores that there cannot be.
        """
        self._reader.check(request.prompt)
        if self._is_split and request.top_logprobs is not None:
            raise ValueError(
                "Batch: expected no top_logprobs for a model on several devices; got some. Use one device."
            )
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request, which may have ended."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif self._reading is not None and self._reading.request is request:
            self._reading = None
        elif self._starting is not None and self._starting.request is request:
            self._starting = None
        else:
            self._rows = [None if row is not None and row.request is request else row for row in self._rows]

    def run(self) -> Iterator[Request]:
        """Make all answers, and return their requests in the order in which they end."""
        while self.is_busy:
            pieces = self.read() if self.can_read else self.decode()
            yield from (request for request, _ in pieces if request.answer.finish is not None)

    def read(self) -> list[Piece]:
        """Read a chunk of a prompt, if one waits and there may be a row. After the last one comes the answer's first token."""
        if not self.can_read:
            return []
        self._start()
        reader, speed = self._reader, self.speed
        if self._reading is None:
            request = self._waiting.popleft()
            # What was read before has no scores any more.
            reader.forget(request.prompt[:1] if request.scores_prompt else request.prompt)
            kept = len(reader.tokens)
            chunks = collections.deque(reader.chunks(request.prompt[kept:]))
            self._reading = _Reading(request, chunks, [Score(request.prompt[0], None, [])])
            speed.kept_tokens += kept
        request, chunks = self._reading.request, self._reading.chunks
        chunk = chunks.popleft()
        reader.prepare(chunk)
        self._chooser.prepare()
        token, score = None, None
        start = time.perf_counter()
        logits = jax.block_until_ready(reader.read(chunk))
        if request.scores_prompt:
            self._reading.scores += self._prompt_scores(request, len(chunk))
        if not chunks and request.max_tokens:
            request.choice.start(request.prompt)
            token = self._chooser.choose(logits, len(reader.tokens), request.choice)
            (score,) = self._scorer.scores(logits, [token], [request.top_logprobs])
        speed.prompt_seconds += time.perf_counter() - start
        speed.prompt_tokens += len(chunk)
        if chunks:
            return []
        if request.scores_prompt:
            request.answer.score_echo(self._reading.scores)
        self._reading = None
        if token is None:
            return [(request, request.answer.end("max_tokens"))]
        piece = (request, self._push(request, token, score))
        if request.answer.finish is None:
            self._starting = _Row(request, token, len(request.prompt))
        return [piece]

    def decode(self) -> list[Piece]:
        """Make the next token of each answer that has a row."""
        if self._count == 0:
            return []
        self._start()
        self._narrow()
        tokens, lengths = np.zeros((2, len(self._rows)), np.int32)
        for i, row in enumerate(self._rows):
            if row is not None:
                tokens[i], lengths[i] = row.token, row.length
        choices = [None if row is None else row.request.choice for row in self._rows]
        self._caches.programs(len(self._rows))
        start = time.perf_counter()
        tokens = self._caches.step(tokens, lengths, choices).tolist()
        counts = [None if row is None else row.request.top_logprobs for row in self._rows]
        scores = self._scorer.scores(self._caches.logits, tokens, counts)
        self.speed.decode_seconds += time.perf_counter() - start
        self.speed.decoded_tokens += self._count
        pieces: list[Piece] = []
        for i, (row, token, score) in enumerate(zip(self._rows, tokens, scores, strict=True)):
            if row is not None:
                row.token, row.length = token, row.length + 1
                pieces.append((row.request, self._push(row.request, token, score)))
                if row.request.answer.finish is not None:
                    self._rows[i] = None
        return pieces

    @property
    def _count(self) -> int:
        return sum(row is not None for row in (*self._rows, self._starting))

    def _prompt_scores(self, request: Request, count: int) -> list[Score]:
        """Return the scores of the prompt's tokens that follow one of the last `count` that were read."""
        reader, scores = self._reader, list[Score]()
        first = len(reader.tokens) - count + 1
        following = request.prompt[first : first + count]
        for start in range(0, len(following), SHORTEST_CHUNK):
            part = following[start : start + SHORTEST_CHUNK]
            padding = SHORTEST_CHUNK - len(part)
            counts = [request.top_logprobs] * len(part) + [None] * padding
            rated = self._scorer.scores(reader.logits(start), [*part, *[0] * padding], counts)
            scores += [score for score in rated if score is not None]
        return scores

    def _push(self, request: Request, token: int, score: Score | None) -> str:
        answer, limit = request.answer, min(request.max_tokens, self.room - len(request.prompt))
        added = answer.push(token, score)
        if answer.finish is None and answer.num_tokens == limit:
            added += answer.end("max_tokens" if limit == request.max_tokens else "context")
        return added

    def _start(self) -> None:
        """Give a row to the answer whose prompt was read last, if that is not done."""
        if self._starting is None:
            return
        if self._count == 1 or None not in self._rows:
            # As many as will be needed at once: to grow again takes longer than what a few steps of more rows take.
            coming = len(self._waiting) + (self._reading is not None)
            self._resize(self._width_for(min(self._count + coming, self._widths[-1])))
        i = self._rows.index(None)
        self._rows[i], self._starting = self._starting, None
        self._caches.put(i, self._reader.blocks)

    def _narrow(self) -> None:
        """Have fewer rows, when that would have been enough for a while."""
        width = self._width_for(self._count + self.can_read)
        self._idle_steps = self._idle_steps + 1 if width < len(self._rows) else 0
        if self._idle_steps > _PATIENCE:
            self._resize(width)

    def _width_for(self, count: int) -> int:
        return next(width for width in self._widths if width >= count)

    def _resize(self, width: int) -> None:
        kept = [i for i, row in enumerate(self._rows) if row is not None]
        self._caches.resize(width, kept)
        self._rows = [self._rows[i] for i in kept] + [None] * (width - len(kept))
        self._idle_steps = 0
