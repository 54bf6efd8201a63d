"""Text from a GPT that was trained: each token from the whole window before it, as training reads it."""

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from ..decoding.sampling import Sampling, sample
from ..transformer import GPT


def go_on(
    model: GPT,
    tokenizer: Tokenizer,
    text: str,
    *,
    count: int,
    sampling: Sampling,
    seed: int,
    progress: Callable[..., Iterable[Any]],
) -> str:
    """Return a text and `count` tokens more.

    **Arguments:**

    - `text`: of at least one token.
    - `progress`: as `_program.progress`.
    """
    tokens = list(tokenizer.encode(text).ids)
    length, vocab_size = model.positions.num_embeddings, tokenizer.get_vocab_size()
    for step in progress(range(count), desc="writing", unit="token"):
        window = tokens[-length:]
        padded = np.pad(np.asarray(window, np.int32), (0, length - len(window)))  # which no token before sees
        logits = _logits(model, jnp.asarray(padded), jnp.asarray(len(window) - 1, jnp.int32))
        key = jax.random.fold_in(jax.random.key(seed), step)
        tokens.append(int(sample(logits[:vocab_size], key, sampling)))
    return tokenizer.decode(tokens)


@eqx.filter_jit
def _logits(model: GPT, tokens: Int[Array, " length"], last: Int[Array, ""]) -> Float[Array, " vocab"]:
    return jnp.einsum("f,cf->c", model(tokens)[last], model.embedding.weight, preferred_element_type=jnp.float32)
