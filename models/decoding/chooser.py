"""The choice of tokens from logits, for programs that have it, and as a small program of its own, for several texts."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from .sampling import Sampling, Steps, sample


class Choice:
    """The way in which the tokens of one text are chosen.

    **Arguments:**

    - `sampling`, `seed`: by default the most likely token is taken. What a text draws depends on these and its tokens alone.
    """

    def __init__(self, sampling: Sampling | None = None, seed: int = 0):
        self.sampling = sampling or Sampling()
        self.steps = self.sampling.steps
        self.seed = seed
        self.tokens: set[int] = set()  # which a penalty asks for

    def start(self, tokens: Sequence[int]) -> None:
        """Let the text have these tokens."""
        if self.steps.penalty:
            self.tokens = set(tokens)

    def add(self, token: int) -> None:
        if self.steps.penalty:
            self.tokens.add(token)

    def operands(self, vocab_size: int) -> tuple[Any, Any, Any]:
        """Return what `choose` takes for this text: the seed, the values of options, and the tokens seen before."""
        seen = _seen([self], vocab_size)[0] if self.steps.penalty else None
        return np.uint32(self.seed), jax.tree.map(lambda x: x[0], _values([self])), seen


_GREEDY = Choice()


def choose(
    logits: Float[Array, " V"],
    position: Int[Array, ""],
    seed: UInt32[Array, ""],
    sampling: Sampling,
    seen: Bool[Array, " V"] | None,
    steps: Steps,
) -> Int[Array, ""]:
    """The token at this position of a text, in a program that has these steps."""
    return sample(logits, jax.random.fold_in(jax.random.key(seed), position), sampling, seen, steps)


class Chooser:
    """Chooses the next tokens of several texts.

    A program is compiled for each number of texts, and the steps that one of them needs. The values of options are arguments.

    **Arguments:**

    - `vocab_size`: the number of logits.
    - `sharding`: of the logits, if they are split over devices. No device gets them whole.
    """

    def __init__(self, vocab_size: int, sharding: NamedSharding | None = None):
        self._vocab_size = vocab_size
        self._sharding = sharding
        self._programs: dict[tuple[int, Steps], Any] = {}

    def prepare(self, choices: Sequence[Choice | None]) -> None:
        """Compile what `choose` runs, if that is not done. It would do so itself."""
        self._program(len(choices), _steps(choices))

    def choose(
        self,
        logits: Float[Array, "texts V"],
        positions: Int[np.ndarray, " texts"],
        choices: Sequence[Choice | None],
    ) -> Int[np.ndarray, " texts"]:
        """The next token of each text, which is at this position; of a text without a choice, any token."""
        steps = _steps(choices)
        every = [choice or _GREEDY for choice in choices]
        seeds = np.asarray([choice.seed for choice in every], np.uint32)
        seen = _seen(every, self._vocab_size) if steps.penalty else None
        tokens = np.asarray(self._program(len(every), steps)(logits, positions, seeds, _values(every), seen))
        for choice, token in zip(choices, tokens, strict=True):
            if choice is not None:
                choice.add(int(token))
        return tokens

    def _program(self, count: int, steps: Steps) -> Any:
        if (count, steps) not in self._programs:
            shape = functools.partial(jax.ShapeDtypeStruct, (count,))
            logits = jax.ShapeDtypeStruct((count, self._vocab_size), jnp.float32, sharding=self._sharding)
            seen = jax.ShapeDtypeStruct(logits.shape, jnp.bool_) if steps.penalty else None
            values = jax.tree.map(lambda x: shape(x.dtype), _values([]))
            everywhere = None if self._sharding is None else NamedSharding(self._sharding.mesh, PartitionSpec())
            program = jax.jit(jax.vmap(functools.partial(choose, steps=steps)), out_shardings=everywhere)
            operands = logits, shape(jnp.int32), shape(jnp.uint32), values, seen
            self._programs[count, steps] = program.lower(*operands).compile()
        return self._programs[count, steps]


def _steps(choices: Sequence[Choice | None]) -> Steps:
    return functools.reduce(Steps.union, (choice.steps for choice in choices if choice is not None), Steps())


def _seen(choices: Sequence[Choice], vocab_size: int) -> np.ndarray:
    seen = np.zeros((len(choices), vocab_size), bool)
    for row, choice in zip(seen, choices, strict=True):
        row[list(choice.tokens)] = True
    return seen


def _values(choices: Sequence[Choice]) -> Any:
    """The options of all texts, an array for each."""

    def values(name: str, dtype: Any) -> Any:
        return np.asarray([getattr(choice.sampling, name) for choice in choices], dtype)

    return Sampling(
        temperature=values("temperature", np.float32),
        top_k=values("top_k", np.int32),
        top_p=values("top_p", np.float32),
        min_p=values("min_p", np.float32),
        repetition_penalty=values("repetition_penalty", np.float32),
    )
