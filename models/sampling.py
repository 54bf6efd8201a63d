"""The next token from logits."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The way in which a token is chosen. Options that are off by default cost nothing.

    **Attributes:**

    - `temperature`: divides the logits; 0 takes the most likely token.
    - `top_k`: only so many of the most likely tokens are drawn; 0 is all of them.
    - `top_p`: only the most likely tokens whose probabilities, among those that `top_k` leaves, add up to this much are drawn.
    - `min_p`: only tokens that have this much of the most likely one's probability are drawn.
    - `repetition_penalty`: divides the positive logits of tokens that were there before, in the prompt or the answer, and
        multiplies the negative ones. It comes before all else, and holds at a temperature of 0 too.

    Tokens of the same probability are in together, so that they may be more than `top_k`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-6  # nobody can tell it from 0, and the division might overflow

    @property
    def remembers(self) -> bool:
        """True if a draw depends on the tokens before."""
        return self.repetition_penalty != 1


def sample(
    logits: Float[Array, " V"], key: PRNGKeyArray, sampling: Sampling, seen: Bool[Array, " V"] | None = None
) -> Int[Array, ""]:
    """The next token.

    **Arguments:**

    - `seen`: the tokens that were there before, which `sampling.remembers` needs.
    """
    logits = adjusted(logits, sampling, seen)
    if sampling.is_greedy:
        return jnp.argmax(logits).astype(jnp.int32)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def adjusted(
    logits: Float[Array, " V"], sampling: Sampling, seen: Bool[Array, " V"] | None = None
) -> Float[Array, " V"]:
    """The logits that `sample` draws by: those of tokens that are left out are `-inf`."""
    if sampling.remembers:
        if seen is None:
            raise ValueError("sample: expected the tokens seen before, for a repetition penalty; got none.")
        penalty = sampling.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)
    if sampling.is_greedy:
        return logits
    logits = logits / sampling.temperature
    if sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0:
        return logits
    probabilities = jax.nn.softmax(logits)
    return jnp.where(probabilities >= _least_probability(probabilities, sampling), logits, -jnp.inf)


def _least_probability(probabilities: Float[Array, " V"], sampling: Sampling) -> Float[Array, ""]:
    """Return the least probability with which a token is drawn."""
    largest, least = probabilities.max(), jnp.zeros((), jnp.float32)

    def above(threshold: Float[Array, ""]) -> Float[Array, " V"]:
        return jnp.where(probabilities >= threshold, probabilities, 0)

    if 0 < sampling.top_k < probabilities.size:
        least = _threshold(lambda threshold: (probabilities >= threshold).sum() >= sampling.top_k)
    if sampling.top_p < 1:
        mass = sampling.top_p * above(least).sum()
        least = jnp.maximum(least, _threshold(lambda threshold: above(threshold).sum() >= mass))
    if sampling.min_p > 0:
        least = jnp.maximum(least, sampling.min_p * largest)
    return jnp.minimum(least, largest)


def _threshold(keeps_enough: Callable[[Float[Array, ""]], Bool[Array, ""]]) -> Float[Array, ""]:
    """The highest `t` for which `keeps_enough(t)`, which holds for 0 and for no `t` above some one.

    By bisection over the bits of `t`, which are in the order of the floats: 31 sums are faster than a sort.
    """

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # enough is kept at `low`, not at `high`
        middle = low + (high - low) // 2
        enough = keeps_enough(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    infinity = jnp.asarray(0x7F800000, jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (jnp.zeros((), jnp.int32), infinity))
    return jax.lax.bitcast_convert_type(low, jnp.float32)
