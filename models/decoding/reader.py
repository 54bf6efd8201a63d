"""A model that reads tokens into its cache: a prompt chunk by chunk, and an answer as its tokens are chosen."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._rounding import round_up
from ..captured import compile_captured
from ..llama import FEW_TOKENS, Cache, Llama
from ..parallel.sequence_parallel import SequenceLlama
from ..parallel.tensor_parallel import SplitLlama
from .chooser import Choice, choose
from .sampling import Steps


Model = Llama | SplitLlama | SequenceLlama
"""A model on one device, or on several."""

# A program is compiled for each length of a chunk and of a cache: few lengths are few programs. A chunk of several tokens has a
# power of two of them, padding included.
SHORTEST_CHUNK, LONGEST_CHUNK = 32, 512
_CACHE_STEP = 256


class Reader:
    """A model and the tokens that it has read.

    **Arguments:**

    - `model`: a `Llama`, a `SplitLlama` or a `SequenceLlama`.
    - `room`: how many tokens the cache is for; the model's context, if that is less.
    - `longest_chunk`: the most tokens that are read at a time, a power of two.

    **Attributes:**

    - `room`: how many tokens there is room for.
    - `tokens`: those that are in the cache.
    - `shapes`: of `blocks`.
    - `blocks`: the cache, of a `models.llama.Cache`, or `None` before the first token.
    """

    def __init__(self, model: Model, room: int, longest_chunk: int = LONGEST_CHUNK):
        context = model.config.context_length
        self.room = min(room, context)
        self.tokens: list[int] = []
        self.blocks: Any = None
        # Flat, and so faster to pass than a tree of Modules.
        self._weights, self._tree = jax.tree.flatten(model)
        self._states: Any = None  # after each token of the last chunk, if the model is on one device
        # Wherever a chunk begins, it may be padded.
        self._entries = min(round_up(room, _CACHE_STEP), context) + SHORTEST_CHUNK
        self._longest_chunk = longest_chunk
        init = jax.jit(lambda: model.init_cache(self._entries).blocks).lower()
        self.shapes, self._new_blocks = init.out_info, init.compile()
        logits = model.logits_sharding
        if logits is not None:
            self.shapes = jax.tree.map(_placed, self.shapes, self._new_blocks.output_shardings)
        self._programs: dict[int, Any] = {}
        self._logits_program: Any = None
        self._step_programs: dict[tuple[int, Steps], Any] = {}
        self._vocab_size = model.config.vocab_size
        self._everywhere = None if logits is None else NamedSharding(logits.mesh, PartitionSpec())

    def check(self, prompt: Sequence[int]) -> None:
        """Raise `ValueError` if a prompt is empty, or leaves no room for a token."""
        if not 0 < len(prompt) < self.room:
            raise ValueError(f"expected a prompt of 1 to {self.room - 1} tokens; got {len(prompt)} tokens")

    def forget(self, tokens: Sequence[int]) -> None:
        """Forget all but what the cache has in common with `tokens`, of which at least the last one is left to read."""
        if self.blocks is None:  # somebody interrupted a program, which had them
            self.tokens.clear()
        pairs = zip(self.tokens, tokens[:-1], strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(tokens) - 1))
        del self.tokens[common:]

    def chunks(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        """`tokens`, which come after those in the cache, in parts for `read`."""
        parts: list[Sequence[int]] = []
        start = 0
        while start < len(tokens):
            size = self._chunk_size(len(tokens) - start, self._entries - len(self.tokens) - start)
            parts.append(tokens[start : start + size])
            start += size
        return parts

    def prepare(self, chunk: Sequence[int]) -> None:
        """Compile what `read` runs, if that is not done. It would do so itself."""
        self._program(self._padded_size(chunk))

    def programs(self) -> list[Callable[[], Any]]:
        """All that `prepare` compiles for chunks of any length, as functions that compile it."""
        sizes, most = [1], min(self._longest_chunk, self._entries)
        while (size := max(SHORTEST_CHUNK, 2 * sizes[-1])) <= most:
            sizes.append(size)
        return [functools.partial(self._program, size) for size in sizes]

    def read(self, chunk: Sequence[int]) -> jax.Array:
        """Put tokens into the cache.

        **Arguments:**

        - `chunk`: one of `chunks`.

        **Returns:** the logits after the last of them, of shape `(1, vocab_size)`.
        """
        padded = np.zeros(self._padded_size(chunk), np.int32)
        padded[: len(chunk)] = chunk
        program = self._program(len(padded))
        start, count = np.int32(len(self.tokens)), np.int32(len(chunk))
        if self.blocks is None:
            self.blocks = self._new_blocks()
        blocks, self.blocks = self.blocks, None  # they are donated
        logits, self._states, self.blocks = program(self._weights, padded, start, count, blocks)
        self.tokens += chunk
        return logits

    def prepare_logits(self) -> Any:
        """Compile what `logits` runs, if that is not done. It would do so itself."""
        if self._logits_program is None:
            model = jax.tree.unflatten(self._tree, self._weights)
            states = jax.ShapeDtypeStruct((SHORTEST_CHUNK, model.config.embedding_size), model.dtype)
            run = lambda weights, states: jax.tree.unflatten(self._tree, weights).logits(states)
            self._logits_program = compile_captured(run, self._weights, states)
        return self._logits_program

    def logits(self, start: int) -> jax.Array:
        """Return the logits after some tokens of the last chunk that was read, which had several.

        **Arguments:**

        - `start`: the first of them in the chunk, a multiple of `SHORTEST_CHUNK`.

        **Returns:** logits of shape `(SHORTEST_CHUNK, vocab_size)`, of which those after the end of the chunk mean nothing.
        """
        states = jax.lax.dynamic_slice_in_dim(self._states, np.int32(start), SHORTEST_CHUNK)
        return self.prepare_logits()(self._weights, states)

    def prepare_step(self, choice: Choice) -> None:
        """Compile what `step` runs for one token, if that is not done. It would do so itself."""
        self._step_program(1, choice)

    def step(self, tokens: Sequence[int], choice: Choice) -> list[int]:
        """Put a token into the cache, and what is right of guesses of the tokens after it, by one program.

        **Arguments:**

        - `tokens`: the token and the guesses, together at most `models.llama.FEW_TOKENS`.
        - `choice`: of the text, which gets the tokens that are returned.

        **Returns:** the tokens after the first: the guesses that are right, and one more.
        """
        chosen, _ = self._step(tokens, len(self.tokens), choice)
        count = 1  # of tokens that are right
        while count < len(tokens) and tokens[count] == chosen[count - 1]:
            count += 1
        self.tokens += tokens[:count]
        new = chosen[:count].tolist()
        for token in new:
            choice.add(token)
        return new

    def is_exact(self, choice: Choice) -> bool:
        """True if a step of several tokens gives them, bit by bit, the logits that steps of one give.

        It is tried at the end of the room, where attention reads most, and before anything else is read.
        """
        start, tokens = max(0, self.room - FEW_TOKENS), range(FEW_TOKENS)
        _, together = self._step(tokens, start, choice)
        alone = [self._step([token], start + i, choice)[1] for i, token in enumerate(tokens)]
        return np.array_equal(together, np.concatenate(alone))

    def _step(self, tokens: Sequence[int], start: int, choice: Choice) -> tuple[np.ndarray, jax.Array]:
        """Return what is chosen after each token, and the logits."""
        size = 1 if len(tokens) == 1 else FEW_TOKENS
        padded = np.zeros(size, np.int32)
        padded[: len(tokens)] = tokens
        program, operands = self._step_program(size, choice), choice.operands(self._vocab_size)
        if self.blocks is None:
            self.blocks = self._new_blocks()
        blocks, self.blocks = self.blocks, None  # they are donated
        chosen, logits, self.blocks = program(self._weights, padded, np.int32(start), blocks, *operands)
        return np.asarray(chosen), logits

    def _step_program(self, size: int, choice: Choice) -> Any:
        key = size, choice.steps
        if key not in self._step_programs:
            scalar, tokens = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((size,), jnp.int32)
            shapes = self._weights, tokens, scalar, self.shapes, *choice.operands(self._vocab_size)
            run = functools.partial(self._run_step, choice.steps)
            self._step_programs[key] = compile_captured(run, *shapes, donate_argnums=3)
        return self._step_programs[key]

    def _run_step(
        self,
        steps: Steps,
        weights: Any,
        tokens: jax.Array,
        start: jax.Array,
        blocks: Any,
        seed: Any,
        sampling: Any,
        seen: Any,
    ) -> Any:
        model = jax.tree.unflatten(self._tree, weights)
        x, cache = model(tokens, Cache(blocks, start))
        logits, chosen = model.logits(x), []
        # Not by `jax.vmap`: so the choice of each row is, to the bit, that of one alone.
        for i in range(len(tokens)):
            before = None if seen is None else seen.at[tokens[: i + 1]].set(True)
            chosen.append(choose(logits[i], start + i + 1, seed, sampling, before, steps=steps))
        tokens = jnp.stack(chosen)
        if self._everywhere is not None:
            tokens = jax.lax.with_sharding_constraint(tokens, self._everywhere)
        return tokens, logits, cache.blocks

    def _padded_size(self, chunk: Sequence[int]) -> int:
        return self._chunk_size(len(chunk), self._entries - len(self.tokens))

    def _program(self, size: int) -> Any:
        if size not in self._programs:
            scalar, tokens = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((size,), jnp.int32)
            shapes = self._weights, tokens, scalar, scalar, self.shapes
            self._programs[size] = compile_captured(self._run, *shapes, donate_argnums=4)
        return self._programs[size]

    def _run(self, weights: Any, tokens: jax.Array, start: jax.Array, count: jax.Array, blocks: Any) -> Any:
        model = jax.tree.unflatten(self._tree, weights)
        x, cache = model(tokens, Cache(blocks, start), count)
        last = jax.lax.dynamic_slice_in_dim(x, count - 1, 1)
        return model.logits(last), x if self._everywhere is None else None, cache.blocks

    def _chunk_size(self, rest: int, room: int) -> int:
        """The length, with its padding, of the next chunk of `rest` tokens, where the cache has so many entries left."""
        if rest == 1:
            return 1
        size = self._longest_chunk
        while size > SHORTEST_CHUNK and (size // 2 >= rest or size > room):
            size //= 2
        return size


def _placed(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
