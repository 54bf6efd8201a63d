"""Tokens from a model, one after the other."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .llama import Llama
from .reader import Reader
from .sampling import Sampling, sample


@dataclasses.dataclass
class Speed:
    """What a generation took. Compiling is not in it."""

    kept_tokens: int = 0
    """Of the prompt, those that were in the cache before."""
    prompt_tokens: int = 0
    """Of the prompt, those that were read."""
    prompt_seconds: float = 0.0
    decoded_tokens: int = 0
    decode_seconds: float = 0.0

    @property
    def prompt_rate(self) -> float:
        return self.prompt_tokens / max(self.prompt_seconds, 1e-9)

    @property
    def decode_rate(self) -> float:
        return self.decoded_tokens / max(self.decode_seconds, 1e-9)

    def __str__(self) -> str:
        kept = f" after {self.kept_tokens} kept ones" if self.kept_tokens else ""
        text = f"prompt: {self.prompt_tokens} tokens{kept}, {self.prompt_rate:.1f} tokens per second"
        if self.decoded_tokens:
            text += f"; decode: {self.decoded_tokens} tokens, {self.decode_rate:.1f} tokens per second"
        return text


class Generator:
    """Generates after one prompt, or after several with one cache: what a prompt has in common with the tokens in the cache, from
    the first on, is not read again.

    **Arguments:**

    - `model`: a `Llama`.
    - `room`: how many tokens, of prompts and answers, the cache is for; the model's context, if that is less.
    - `sampling`: how tokens are chosen.
    - `seed`: of the sampling.

    **Attributes:**

    - `room`: how many tokens there is room for, `room` or more.
    - `speed`: what the last generation took so far.
    """

    def __init__(self, model: Llama, *, room: int, sampling: Sampling | None = None, seed: int = 0):
        self._reader = Reader(model, room)
        self._sampling = Sampling() if sampling is None else sampling
        self._vocab_size = model.config.vocab_size
        self._choose = self._compiled_choice(seed)
        self.room = self._reader.room
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
        if not 0 < len(tokens) < self.room:
            raise ValueError(f"expected a prompt of 1 to {self.room - 1} tokens; got {len(tokens)} tokens")
        return self._generate(list(tokens), min(max_tokens, self.room - len(tokens)), stopped, progress)

    def _generate(
        self, tokens: list[int], max_tokens: int, stopped: Callable[[], bool], progress: Any
    ) -> Iterator[int]:
        reader = self._reader
        reader.forget(tokens)
        kept = len(reader.tokens)
        self.speed = speed = Speed(kept_tokens=kept)
        seen, logits = self._seen(tokens), None
        chunks = reader.chunks(tokens[kept:])
        for chunk in progress(chunks) if len(chunks) > 1 else chunks:
            if stopped():
                return
            reader.prepare(chunk)
            start = time.perf_counter()
            logits = jax.block_until_ready(reader.read(chunk))
            speed.prompt_seconds += time.perf_counter() - start
            speed.prompt_tokens += len(chunk)
        start = time.perf_counter()
        token, seen = self._choose(logits, np.int32(len(reader.tokens)), seen)
        value = int(token)
        speed.prompt_seconds += time.perf_counter() - start
        yield value
        for _ in range(max_tokens - 1):
            if stopped():
                return
            reader.prepare([value])
            start = time.perf_counter()
            token, seen = self._choose(reader.read([value]), np.int32(len(reader.tokens)), seen)
            value = int(token)
            speed.decode_seconds += time.perf_counter() - start
            speed.decoded_tokens += 1
            yield value

    def _seen(self, tokens: Sequence[int]) -> np.ndarray | None:
        if not self._sampling.remembers:
            return None
        seen = np.zeros(self._vocab_size, bool)
        seen[tokens] = True
        return seen

    def _compiled_choice(self, seed: int) -> Any:
        def choose(logits: jax.Array, position: jax.Array, seen: Any) -> tuple[jax.Array, Any]:
            # A draw depends on the position, and not on how many there were before.
            token = sample(logits, jax.random.fold_in(jax.random.key(seed), position), self._sampling, seen)
            return token, None if seen is None else seen.at[token].set(True)

        shapes = (((self._vocab_size,), jnp.float32), ((), jnp.int32), ((self._vocab_size,), jnp.bool_))
        logits, position, seen = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
        return jax.jit(choose).lower(logits, position, seen if self._sampling.remembers else None).compile()
