"""The log-probabilities of tokens, for answers that tell them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..captured import compile_captured


MOST_ALTERNATIVES = 20


class Score(NamedTuple):
    """A token of a prompt or an answer, as the model rates it: before any option of the choice has changed the logits.

    **Attributes:**

    - `token`: the one that is there.
    - `logprob`: the natural logarithm of its probability. `None` for the first token of a prompt, which follows nothing.
    - `top`: the likeliest tokens at its place and their log-probabilities, the likeliest first.
    """

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]]


class Scorer:
    """Rates the tokens of several texts, by a program that runs only if one of them tells its scores.

    **Arguments:**

    - `vocab_size`: the number of logits of a text.
    """

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._programs: dict[int, Any] = {}

    def prepare(self, width: int) -> Any:
        """Compile what `scores` runs for so many texts, if that is not done. It would do so itself."""
        if width not in self._programs:
            logits = jax.ShapeDtypeStruct((width, self._vocab_size), jnp.float32)
            tokens = jax.ShapeDtypeStruct((width,), jnp.int32)
            self._programs[width] = compile_captured(_rate, logits, tokens)
        return self._programs[width]

    def scores(self, logits: Any, tokens: Sequence[int], counts: Sequence[int | None]) -> list[Score | None]:
        """Rate a token of each text.

        **Arguments:**

        - `logits`: of shape `(texts, vocab_size)`.
        - `counts`: how many alternatives each text tells, at most `MOST_ALTERNATIVES`; `None` for a text without scores.
        """
        if all(count is None for count in counts):
            return [None] * len(counts)
        chosen, top, indices = map(np.asarray, self.prepare(len(tokens))(logits, np.asarray(tokens, np.int32)))
        scores: list[Score | None] = []
        for i, count in enumerate(counts):
            if count is None:
                scores.append(None)
                continue
            alternatives = zip(indices[i, :count].tolist(), top[i, :count].tolist(), strict=True)
            scores.append(Score(int(tokens[i]), float(chosen[i]), list(alternatives)))
        return scores


def _rate(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, ...]:
    logprobs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    return chosen, *jax.lax.top_k(logprobs, min(MOST_ALTERNATIVES, logits.shape[1]))
