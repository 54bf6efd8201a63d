"""Text from a GPT that was trained: each token from the whole window before it, as training reads it, by one program."""

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from tokenizers import Tokenizer

from ..captured import jit_captured
from ..decoding.chooser import Choice, choose
from ..decoding.sampling import Sampling, Steps
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
    weights, static = eqx.partition(model, eqx.is_array)
    choice = Choice(sampling, seed)
    next_token = make_step(static, vocab_size, choice.steps)
    for step in progress(range(count), desc="writing", unit="token"):
        window = tokens[-length:]
        padded = np.pad(np.asarray(window, np.int32), (0, length - len(window)))  # which no token before sees
        places = np.int32(len(window) - 1), np.int32(step)
        tokens.append(int(next_token(weights, padded, *places, *choice.operands(vocab_size))))
    return tokenizer.decode(tokens)


def make_step(static: GPT, vocab_size: int, steps: Steps) -> Any:
    """Return the program of a token: the logits, and the choice.

    **Arguments:**

    - `static`: the model without its arrays, which the program takes first.
    - `vocab_size`: the number of tokens that the tokenizer has; the model may have rows for more.
    - `steps`: of the choice.
    """

    @jit_captured
    def next_token(
        weights: GPT, tokens: Int[Array, " length"], last: Int[Array, ""], step: Int[Array, ""], *operands: Any
    ) -> Int[Array, ""]:
        x, table = eqx.combine(weights, static)(tokens)[last], weights.embedding.weight
        logits = jnp.einsum("f,cf->c", x, table, preferred_element_type=jnp.float32)
        return choose(logits[:vocab_size], step, *operands, steps=steps)

    return next_token
