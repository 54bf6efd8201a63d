"""A model that reads tokens into its cache, chunk by chunk."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._rounding import round_up
from ..captured import compile_captured
from ..llama import Cache, Llama
from ..parallel.sequence_parallel import SequenceLlama
from ..parallel.tensor_parallel import SplitLlama


Model = Llama | SplitLlama | SequenceLlama
"""A model on one device, or on several."""

# A program is compiled for each length of a chunk and of a cache: few lengths are few programs. A chunk of several tokens has a
# power of two of them, padding included.
_SHORTEST_CHUNK, LONGEST_CHUNK = 32, 512
_CACHE_STEP = 256


class Reader:
    """A model and the tokens that it has read.

    **Arguments:**

    - `model`: a `Llama`, a `SplitLlama` or a `SequenceLlama`.
    - `room`: how many tokens the cache is for; the model's context, if that is less.
    - `longest_chunk`: the most tokens that are read at a time, a power of two.

    **Attributes:**

    - `room`: how many tokens there is room for, `room` or more.
    - `tokens`: those that are in the cache.
    - `shapes`: of `blocks`.
    - `blocks`: the cache, of a `models.llama.Cache`, or `None` before the first token.
    """

    def __init__(self, model: Model, room: int, longest_chunk: int = LONGEST_CHUNK):
        self.room = min(round_up(room, _CACHE_STEP), model.config.context_length)
        self.tokens: list[int] = []
        self.blocks: Any = None
        # Flat, and so faster to pass than a tree of Modules.
        self._weights, self._tree = jax.tree.flatten(model)
        self._entries = self.room + _SHORTEST_CHUNK  # wherever a chunk begins, it may be padded
        self._longest_chunk = longest_chunk
        init = jax.jit(lambda: model.init_cache(self._entries).blocks).lower()
        self.shapes, self._new_blocks = init.out_info, init.compile()
        self._programs: dict[int, Any] = {}

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
        sizes = [1]
        while sizes[-1] < self._longest_chunk:
            sizes.append(max(_SHORTEST_CHUNK, 2 * sizes[-1]))
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
        logits, self.blocks = program(self._weights, padded, start, count, blocks)
        self.tokens += chunk
        return logits

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
        return model.logits(last), cache.blocks

    def _chunk_size(self, rest: int, room: int) -> int:
        """The length, with its padding, of the next chunk of `rest` tokens, where the cache has so many entries left."""
        if rest == 1:
            return 1
        size = self._longest_chunk
        while size > _SHORTEST_CHUNK and (size // 2 >= rest or size > room):
            size //= 2
        return size
