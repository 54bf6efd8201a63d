"""Answers to many prompts, several of which are decoded at a time."""

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .answer import Answer
from .chooser import Chooser
from .generator import Generator, Speed
from .llama import Cache, Llama
from .sampling import Sampling


@dataclasses.dataclass
class _Row:
    """An answer that is being made."""

    index: int
    answer: Answer
    max_tokens: int
    room: int

    def push(self, token: int) -> bool:
        """Returns whether the answer goes on."""
        answer = self.answer
        answer.push(token)
        if answer.finish is None and answer.num_tokens == min(self.max_tokens, self.room):
            answer.end("max_tokens" if answer.num_tokens == self.max_tokens else "context")
        return answer.finish is None


class Batch:
    """Generates after many prompts. One program makes the next tokens of all rows, which reads the weights once.

    Each prompt is read as if alone. Its cache becomes a row of the batch's, and when its answer ends, the next prompt takes the
    row. What a prompt has in common with the one before, such as the system message, is not read again.

    **Arguments:**

    - `model`: a `Llama`.
    - `rows`: how many answers are made at a time.
    - `room`: for how many tokens a row is; the model's context, if that is less.
    - `sampling`, `seed`: of each row, as of a `Generator`.

    **Attributes:**

    - `speed`: what all took so far.
    """

    def __init__(self, model: Llama, *, rows: int, room: int, sampling: Sampling | None = None, seed: int = 0):
        self.speed = Speed()
        self._generator = Generator(model, room=room, sampling=sampling, seed=seed)
        self._chooser = Chooser(rows, model.config.vocab_size, sampling, seed)
        self._rows: list[_Row | None] = [None] * rows
        self._tokens = np.zeros((rows, 1), np.int32)
        self._lengths = np.zeros(rows, np.int32)
        self._weights, self._tree = jax.tree.flatten(model)
        shapes = self._generator.reader.shapes
        many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype), shapes)
        zeros = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), many))
        self._blocks = zeros.lower().compile()()
        put = jax.jit(self._put, donate_argnums=0)
        self._put_row = put.lower(many, shapes, jax.ShapeDtypeStruct((), jnp.int32)).compile()
        step = jax.jit(self._step, donate_argnums=3)
        self._next = step.lower(self._weights, self._tokens, self._lengths, many).compile()

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Answer],
        *,
        max_tokens: int,
    ) -> Iterator[int]:
        """The indices of the answers, in the order in which they end.

        **Arguments:**

        - `prompts`: tokens.
        - `answers`: take the tokens that follow, one for each prompt.
        - `max_tokens`: the most tokens of an answer.

        **Raises:** `ValueError` for a prompt that is empty, or leaves no room for a token.
        """
        waiting = collections.deque(enumerate(zip(prompts, answers, strict=True)))
        while True:
            for i in range(len(self._rows)):
                while waiting and self._rows[i] is None:
                    index, (prompt, answer) = waiting.popleft()
                    row = _Row(index, answer, max_tokens, self._generator.room - len(prompt))
                    token = self._read(prompt)
                    if row.push(token):
                        self._begin(i, row, [*prompt, token])
                    else:
                        yield index
            rows = [(i, row) for i, row in enumerate(self._rows) if row is not None]
            if not rows:
                return
            tokens = self._decode(len(rows))
            for i, row in rows:
                self._tokens[i], self._lengths[i] = tokens[i], self._lengths[i] + 1
                if not row.push(int(tokens[i])):
                    self._rows[i], self._lengths[i] = None, 0
                    yield row.index

    def _read(self, prompt: Sequence[int]) -> int:
        """The first token after a prompt, whose keys and values are in the generator's cache then."""
        (token,) = self._generator.generate(prompt, max_tokens=1)
        speed = self._generator.speed
        self.speed.kept_tokens += speed.kept_tokens
        self.speed.prompt_tokens += speed.prompt_tokens
        self.speed.prompt_seconds += speed.prompt_seconds
        return token

    def _begin(self, i: int, row: _Row, tokens: Sequence[int]) -> None:
        """Let an answer, whose prompt has just been read, go on in a row."""
        self._blocks = self._put_row(self._blocks, self._generator.reader.blocks, np.int32(i))
        self._chooser.start(i, tokens)
        self._rows[i], self._tokens[i], self._lengths[i] = row, tokens[-1], len(tokens) - 1

    def _decode(self, count: int) -> np.ndarray:
        """The next token of each row, of which `count` are in use."""
        start = time.perf_counter()
        logits, self._blocks = self._next(self._weights, self._tokens, self._lengths, self._blocks)
        tokens = self._chooser.choose(logits, self._lengths + 1)
        self.speed.decode_seconds += time.perf_counter() - start
        self.speed.decoded_tokens += count
        return tokens

    def _step(self, weights: Any, tokens: jax.Array, lengths: jax.Array, blocks: Any) -> Any:
        model = jax.tree.unflatten(self._tree, weights)

        def one(tokens: jax.Array, length: jax.Array, blocks: Any) -> Any:
            x, cache = model(tokens, Cache(blocks, length))
            return model.logits(x)[0], cache.blocks

        return jax.vmap(one)(tokens, lengths, blocks)

    def _put(self, blocks: Any, row: Any, i: jax.Array) -> Any:
        return jax.tree.map(lambda many, one: jax.lax.dynamic_update_index_in_dim(many, one, i, 0), blocks, row)
