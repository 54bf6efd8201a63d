"""The next token from logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


def sample(logits: Float[Array, " V"], key: PRNGKeyArray, *, temperature: float, top_p: float) -> Int[Array, ""]:
    """**Arguments:**

    - `temperature`: divides the logits; 0 takes the most likely token.
    - `top_p`: only the most likely tokens whose probabilities add up to this much are drawn. Ties are in together.
    """
    if temperature < 1e-6:  # nobody can tell it from 0, and the division might overflow
        return jnp.argmax(logits).astype(jnp.int32)
    logits = logits / temperature
    if top_p < 1:
        probabilities = jax.nn.softmax(logits)
        threshold = jnp.minimum(_nucleus_threshold(probabilities, top_p), probabilities.max())
        logits = jnp.where(probabilities >= threshold, logits, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def _nucleus_threshold(probabilities: Float[Array, " V"], top_p: float) -> Float[Array, ""]:
    """The highest `t` such that the probabilities of at least `t` add up to `top_p`.

    By bisection over the bits of `t`, which are in the order of the floats: 31 sums are faster than a sort.
    """

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # enough is kept at `low`, not at `high`
        middle = low + (high - low) // 2
        threshold = jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.where(probabilities >= threshold, probabilities, 0).sum() >= top_p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    infinity = jnp.asarray(0x7F800000, jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (jnp.zeros((), jnp.int32), infinity))
    return jax.lax.bitcast_convert_type(low, jnp.float32)
