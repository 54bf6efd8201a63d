"""Tokens from a model: one jitted program for the prompt, one for each token after it."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._rounding import round_up
from .llama import Llama
from .sampling import sample


# Prompts are padded to a multiple of this, and caches made for a multiple: fewer shapes to compile programs for.
_PROMPT_STEP = 32
_CACHE_STEP = 256


@dataclasses.dataclass
class Speed:
    """The time that a generation took. Compiling is not in it."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decoded_tokens: int = 0
    decode_seconds: float = 0.0

    def __str__(self) -> str:
        prompt = self.prompt_tokens / max(self.prompt_seconds, 1e-9)
        text = f"prompt: {self.prompt_tokens} tokens, {prompt:.1f} tokens per second"
        if self.decoded_tokens:
            decode = self.decoded_tokens / max(self.decode_seconds, 1e-9)
            text += f"; decode: {self.decoded_tokens} tokens, {decode:.1f} tokens per second"
        return text


class Generator:
    """Generates after one prompt.

    **Arguments:**

    - `model`: a `Llama`.
    - `tokens`: the prompt.
    - `max_tokens`: how many tokens to make room for. Less room is made where the model's context ends.
    - `temperature`, `top_p`: as in `models.sampling.sample`.
    - `seed`: of the sampling.

    **Attributes:**

    - `speed`: what the last iteration took so far.

    **Raises:** `ValueError` if the prompt is empty or longer than the model's context.
    """

    def __init__(
        self,
        model: Llama,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ):
        context = model.config.context_length
        if not 0 < len(tokens) < context:
            raise ValueError(
                f"expected a prompt of 1 to {context - 1} tokens, the model's context; got {len(tokens)} tokens"
            )
        self.speed = Speed()
        self._tokens = tokens
        self._max_tokens = min(max_tokens, context - len(tokens))
        self._model = model
        # Flat, and so faster to pass than a tree of Modules.
        self._weights, tree = jax.tree.flatten(model)
        self._cache_length = min(round_up(len(tokens) + self._max_tokens, _CACHE_STEP), round_up(context, _PROMPT_STEP))
        self._key = jax.random.key(seed)

        def next_token(model: Llama, x: jax.Array, position: jax.Array) -> jax.Array:
            key = jax.random.fold_in(self._key, position)
            return sample(model.logits(x)[0], key, temperature=temperature, top_p=top_p)

        def prompt(weights: Any, tokens: jax.Array, count: jax.Array, cache: Any) -> Any:
            model = jax.tree.unflatten(tree, weights)
            x, cache = model(tokens, cache, count)
            last = jax.lax.dynamic_slice_in_dim(x, count - 1, 1)
            return next_token(model, last, count), cache

        def step(weights: Any, token: jax.Array, cache: Any) -> Any:
            model = jax.tree.unflatten(tree, weights)
            x, cache = model(token[None], cache)
            return next_token(model, x, cache.length), cache

        cache = jax.eval_shape(lambda: model.init_cache(self._cache_length))
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        padded = jax.ShapeDtypeStruct((round_up(len(tokens), _PROMPT_STEP),), jnp.int32)
        self._prompt = jax.jit(prompt, donate_argnums=3).lower(self._weights, padded, scalar, cache).compile()
        self._step = jax.jit(step, donate_argnums=2).lower(self._weights, scalar, cache).compile()

    def __iter__(self) -> Iterator[int]:
        """The tokens, until there are `max_tokens` of them."""
        count = len(self._tokens)
        padded = np.zeros(round_up(count, _PROMPT_STEP), np.int32)
        padded[:count] = self._tokens
        cache = jax.block_until_ready(self._model.init_cache(self._cache_length))
        self.speed = Speed(prompt_tokens=count)
        start = time.perf_counter()
        token, cache = self._prompt(self._weights, padded, np.int32(count), cache)
        value = int(token)
        self.speed.prompt_seconds = time.perf_counter() - start
        yield value
        for _ in range(self._max_tokens - 1):
            start = time.perf_counter()
            token, cache = self._step(self._weights, token, cache)
            value = int(token)
            self.speed.decode_seconds += time.perf_counter() - start
            self.speed.decoded_tokens += 1
            yield value
