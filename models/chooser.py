"""The next tokens of several texts, by a small program of its own: the model's programs know nothing of sampling."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from .sampling import Sampling, sample


class Chooser:
    """Chooses the next tokens of several texts, the rows.

    **Arguments:**

    - `rows`: how many.
    - `vocab_size`: the number of logits.
    - `sampling`, `seed`: of the choice, by default the most likely token. What a row draws depends on the seed and the
        row's own tokens alone.
    - `sharding`: of the logits, if they are split over devices. No device gets them whole.
    """

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        sampling: Sampling | None,
        seed: int,
        sharding: NamedSharding | None = None,
    ):
        sampling = sampling or Sampling()

        def choose(logits: jax.Array, position: jax.Array, seen: Any) -> jax.Array:
            return sample(logits, jax.random.fold_in(jax.random.key(seed), position), sampling, seen)

        self._seen = np.zeros((rows, vocab_size), bool) if sampling.remembers else None
        shapes = (
            jax.ShapeDtypeStruct((rows, vocab_size), jnp.float32, sharding=sharding),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        )
        everywhere = None if sharding is None else NamedSharding(sharding.mesh, PartitionSpec())
        self._choose = jax.jit(jax.vmap(choose), out_shardings=everywhere).lower(*shapes, self._seen).compile()

    def start(self, row: int, tokens: Sequence[int]) -> None:
        """Let a row have these tokens."""
        if self._seen is not None:
            self._seen[row] = False
            self._seen[row, tokens] = True

    def choose(self, logits: Float[Array, "rows V"], positions: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
        """The next token of each row, which is at this position."""
        tokens = np.asarray(self._choose(logits, positions, self._seen))
        if self._seen is not None:
            self._seen[np.arange(len(tokens)), tokens] = True
        return tokens
