"""The choice of tokens from logits, for programs that have it, and as a small program of its own."""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from .sampling import Sampling, Steps, sample


@dataclasses.dataclass(frozen=True)
class Bias:
    """The changes of logits that OpenAI's requests ask for. By default there are none.

    **Attributes:**

    - `frequency`: subtracted from the logit of a token for each time that the answer has it.
    - `presence`: subtracted once from the logits of tokens that the answer has.
    - `of_tokens`: added to the logits of these tokens.
    """

    frequency: float = 0.0
    presence: float = 0.0
    of_tokens: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def of(self, token: int, count: int) -> float:
        """Return what is added for a token that the answer has so many times."""
        return self.of_tokens.get(token, 0.0) - count * self.frequency - (count > 0) * self.presence


class Choice:
    """The way in which the tokens of one text are chosen.

    **Arguments:**

    - `sampling`, `seed`: by default the most likely token is taken. What a text draws depends on these and its tokens alone.
    - `bias`: changes logits before that. For a `Batch`; the programs of one text have no such step.
    """

    def __init__(self, sampling: Sampling | None = None, seed: int = 0, bias: Bias | None = None):
        bias = bias or Bias()
        self.sampling = sampling or Sampling()
        self.steps = self.sampling.steps._replace(bias=bias != Bias())
        self.seed = seed
        self.bias = bias
        self.tokens: set[int] = set()  # which a penalty asks for
        self.added = dict(bias.of_tokens)  # what the bias of each token has come to
        self._counts: collections.Counter[int] = collections.Counter()  # of the answer's tokens

    def start(self, tokens: Sequence[int]) -> None:
        """Let the text have these tokens, after which the answer comes."""
        if self.steps.penalty:
            self.tokens = set(tokens)
        self.added = dict(self.bias.of_tokens)
        self._counts.clear()

    def add(self, token: int) -> None:
        if self.steps.penalty:
            self.tokens.add(token)
        if self.steps.bias:
            self._counts[token] += 1
            self.added[token] = self.bias.of(token, self._counts[token])

    def operands(self, vocab_size: int) -> tuple[Any, Any, Any]:
        """Return what `choose` takes for this text: the seed, the values of options, and the tokens seen before."""
        if self.steps.bias:
            raise ValueError("Choice: expected no bias for a program of one text; got one. Use a Batch.")
        seen = _seen([self], vocab_size)[0] if self.steps.penalty else None
        return np.uint32(self.seed), jax.tree.map(lambda x: x[0], _values([self])), seen


_GREEDY = Choice()


def choose(
    logits: Float[Array, " V"],
    position: Int[Array, ""],
    seed: UInt32[Array, ""],
    sampling: Sampling,
    seen: Bool[Array, " V"] | None,
    bias: Float[Array, " V"] | None = None,
    *,
    steps: Steps,
) -> Int[Array, ""]:
    """The token at this position of a text, in a program that has these steps."""
    return sample(logits, jax.random.fold_in(jax.random.key(seed), position), sampling, seen, bias, steps)


def choose_each(
    logits: Float[Array, "texts V"],
    positions: Int[Array, " texts"],
    seeds: UInt32[Array, " texts"],
    sampling: Sampling,
    seen: Bool[Array, "texts V"],
    bias: Float[Array, "texts V"],
    steps: Steps,
) -> Int[Array, " texts"]:
    """The tokens at these positions of several texts. All that follows the positions is of `operands_of`."""
    each = jax.vmap(functools.partial(choose, steps=steps))  # `steps` of all, so that a step runs or does not
    return each(logits, positions, seeds, sampling, seen, bias)


def operands_of(
    choices: Sequence[Choice | None],
    unseen: Bool[Array | np.ndarray, "texts V"],
    unbiased: Float[Array | np.ndarray, "texts V"] | None = None,
) -> tuple[UInt32[np.ndarray, " texts"], Sampling, Any, Any, Steps]:
    """Return what `choose_each` takes of these texts. A text without a choice gets any token.

    **Arguments:**

    - `unseen`, `unbiased`: falses and zeros, for texts of which none has a penalty or a bias. Those on the device need not be
        copied there.

    **Returns:** the seeds, the options, the tokens seen before, the bias, and the steps that one of the texts needs.
    """
    every = [choice or _GREEDY for choice in choices]
    steps = Steps(*(np.bool_(any(step)) for step in zip(*(choice.steps for choice in every), strict=True)))
    seen = _seen(every, unseen.shape[1]) if steps.penalty else unseen
    bias = np.zeros(unseen.shape, np.float32) if unbiased is None else unbiased
    if steps.bias:
        bias = _added(every, unseen.shape[1])
    return np.asarray([choice.seed for choice in every], np.uint32), _values(every), seen, bias, steps


class Chooser:
    """Chooses the first token of an answer, from the logits after its prompt.

    **Arguments:**

    - `vocab_size`: the number of logits.
    - `steps`: of all answers. By default the program has all steps, and an answer may need any. Without steps there is no
        program: NumPy finds the likeliest token in less time than one takes to load.
    - `sharding`: of the logits, if they are split over devices. No device gets them whole.
    """

    def __init__(self, vocab_size: int, steps: Steps | None = None, sharding: NamedSharding | None = None):
        self._steps = steps
        self._sharding = sharding
        self._is_by_numpy = sharding is None and steps == Steps()
        self._unseen = np.zeros((1, vocab_size), bool)
        self._program: Any = None

    def prepare(self) -> None:
        """Compile what `choose` runs, if that is not done. It would do so itself."""
        if self._program is None and not self._is_by_numpy:
            logits = jax.ShapeDtypeStruct(self._unseen.shape, jnp.float32, sharding=self._sharding)
            operands = logits, np.zeros(1, np.int32), *operands_of([None], self._unseen)
            everywhere = None if self._sharding is None else NamedSharding(self._sharding.mesh, PartitionSpec())
            self._program = jax.jit(self._run, out_shardings=everywhere).lower(*operands).compile()

    def choose(self, logits: Any, position: int, choice: Choice) -> int:
        """The token at this position of a text, which gets it."""
        self.prepare()
        if self._is_by_numpy:
            token = int(np.asarray(logits).argmax())
        else:
            operands = operands_of([choice], self._unseen)
            token = int(np.asarray(self._program(logits, np.asarray([position], np.int32), *operands))[0])
        choice.add(token)
        return token

    def _run(self, logits: Any, positions: Any, seeds: Any, sampling: Any, seen: Any, bias: Any, steps: Steps) -> Any:
        steps = steps if self._steps is None else self._steps
        return choose_each(logits, positions, seeds, sampling, seen, bias, steps)


def _seen(choices: Sequence[Choice], vocab_size: int) -> np.ndarray:
    seen = np.zeros((len(choices), vocab_size), bool)
    for row, choice in zip(seen, choices, strict=True):
        row[list(choice.tokens)] = True
    return seen


def _added(choices: Sequence[Choice], vocab_size: int) -> np.ndarray:
    added = np.zeros((len(choices), vocab_size), np.float32)
    for row, choice in zip(added, choices, strict=True):
        row[list(choice.added)] = list(choice.added.values())
    return added


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
