"""Tokens from a model, one after the other."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from ..llama import FEW_TOKENS
from .chooser import Choice, Chooser
from .lookup import InexactRows, Lookup
from .reader import Model, Reader
from .sampling import Sampling


@dataclasses.dataclass
class Speed:
    """The time that a generation took. Compiling is not in it."""

    kept_tokens: int = 0
    """Tokens of the prompt that were in the cache before."""
    prompt_tokens: int = 0
    """Tokens of the prompt that were read."""
    prompt_seconds: float = 0.0
    decoded_tokens: int = 0
    decode_seconds: float = 0.0
    guessed_tokens: int = 0
    """Guesses of tokens, which were read together with the token before them."""
    accepted_tokens: int = 0
    """Guesses that were right: they are among `decoded_tokens`."""

    @property
    def prompt_rate(self) -> float:
        return self.prompt_tokens / max(self.prompt_seconds, 1e-9)

    @property
    def decode_rate(self) -> float:
        return self.decoded_tokens / max(self.decode_seconds, 1e-9)

    def record(self) -> dict[str, Any]:
        """Return the figures for `--json`."""
        return {
            "kept_tokens": self.kept_tokens,
            "read_tokens": self.prompt_tokens,
            "read_tokens_per_second": round(self.prompt_rate, 1),
            "decoded_tokens": self.decoded_tokens,
            "decoded_tokens_per_second": round(self.decode_rate, 1),
            "guessed_tokens": self.guessed_tokens,
            "accepted_tokens": self.accepted_tokens,
        }

    def __str__(self) -> str:
        kept = f" after {self.kept_tokens} kept ones" if self.kept_tokens else ""
        text = f"prompt: {self.prompt_tokens} tokens{kept}, {self.prompt_rate:.1f} tokens per second"
        if self.decoded_tokens:
            text += f"; decode: {self.decoded_tokens} tokens, {self.decode_rate:.1f} tokens per second"
        if self.guessed_tokens:
            text += f", {self.accepted_tokens} of {self.guessed_tokens} guesses right"
        return text


class Generator:
    """Generates after one prompt, or after several with one cache: what a prompt has in common with the tokens in the cache, from
    the first on, is not read again.

    **Arguments:**

    - `model`: a `Llama`, a `SplitLlama` or a `SequenceLlama`.
    - `room`: how many tokens, of prompts and answers, the cache is for; the model's context, if that is less.
    - `sampling`: how tokens are chosen.
    - `seed`: of the sampling.
    - `lookup`: whether programs read guesses of the next tokens as well, of a `models.decoding.lookup.Lookup`. The tokens are
        the same. Not for a `SequenceLlama`, which reads one token or a chunk.

    **Attributes:**

    - `room`: how many tokens there is room for.
    - `reader`: what has the cache.
    - `speed`: what the last generation took so far.

    **Raises:** `models.decoding.lookup.InexactRows` if guesses are asked for, and might change the tokens.
    """

    def __init__(
        self,
        model: Model,
        *,
        room: int,
        sampling: Sampling | None = None,
        seed: int = 0,
        lookup: bool = False,
    ):
        self.reader = Reader(model, room)
        self.room = self.reader.room
        self._choice = Choice(sampling, seed)
        self._chooser = Chooser(model.config.vocab_size, self._choice.steps, model.logits_sharding)
        self._chooser.prepare()
        self._lookup = Lookup(FEW_TOKENS - 1) if lookup else None
        if lookup and not self.reader.is_exact(self._choice):
            raise InexactRows
        self.speed = Speed()

    def generate(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        stopped: Callable[[], bool] = lambda: False,
        progress: Callable[[list[Any]], Iterable[Any]] = iter,
    ) -> Iterator[int]:
        """**Arguments:**

        - `tokens`: the whole prompt, with what is in the cache.
        - `max_tokens`: the most tokens to generate. They are fewer where the room ends.
        - `stopped`: ends the iteration when it returns true. It is asked before each program that runs.
        - `progress`: wraps the iteration over the chunks of a prompt, as `tqdm` does.

        **Raises:** `ValueError` if the prompt is empty, or leaves no room for a token.
        """
        self.reader.check(tokens)
        return self._generate(list(tokens), min(max_tokens, self.room - len(tokens)), stopped, progress)

    def _generate(
        self, tokens: list[int], max_tokens: int, stopped: Callable[[], bool], progress: Any
    ) -> Iterator[int]:
        reader = self.reader
        reader.forget(tokens)
        kept = len(reader.tokens)
        self.speed = speed = Speed(kept_tokens=kept)
        self._choice.start(tokens)
        chunks, logits = reader.chunks(tokens[kept:]), None
        for chunk in progress(chunks) if len(chunks) > 1 else chunks:
            if stopped():
                return
            reader.prepare(chunk)
            start = time.perf_counter()
            logits = jax.block_until_ready(reader.read(chunk))
            speed.prompt_seconds += time.perf_counter() - start
            speed.prompt_tokens += len(chunk)
        start = time.perf_counter()
        token = self._chooser.choose(logits, len(reader.tokens), self._choice)
        if self._lookup is not None:
            self._lookup.start([*tokens, token])
        speed.prompt_seconds += time.perf_counter() - start
        yield token
        count = 1
        while count < max_tokens:
            if stopped():
                return
            reader.prepare_step(self._choice)
            start = time.perf_counter()
            new = self._step(token, max_tokens - count)
            speed.decode_seconds += time.perf_counter() - start
            for next_token in new:
                speed.decoded_tokens += 1
                yield next_token
            token, count = new[-1], count + len(new)

    def _step(self, token: int, most: int) -> list[int]:
        """Return the tokens after `token`, from one to `most` of them."""
        lookup = self._lookup
        if lookup is None:
            return self.reader.step([token], self._choice)
        guesses = lookup.guess()[: most - 1]
        start = time.perf_counter()
        new = self.reader.step([token, *guesses], self._choice)
        lookup.took(time.perf_counter() - start, guessed=bool(guesses))
        for next_token in new:
            lookup.add(next_token)
        self.speed.guessed_tokens += len(guesses)
        self.speed.accepted_tokens += len(new) - 1
        return new
