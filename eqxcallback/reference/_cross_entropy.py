"""Cross-entropy of a softmax."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._precision import wide


def softmax_cross_entropy(logits: Float[Array, "*batch size"], labels: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    logs = jax.nn.log_softmax(logits.astype(wide(logits.dtype)), axis=-1)
    # A negative label counts from the end, and one that is out of range gives NaN.
    return -jnp.take_along_axis(logs, labels[..., None], axis=-1, mode="fill")[..., 0]
