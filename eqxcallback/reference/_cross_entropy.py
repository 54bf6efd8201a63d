"""Cross-entropy of a softmax."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._precision import wide


def softmax_cross_entropy(
    logits: Float[Array, "*batch size"],
    labels: Int[Array, "*batch"],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
) -> Float[Array, "*batch"]:
    logits = logits.astype(wide(logits.dtype))
    ignored = jnp.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index
    if ignore_index is not None:  # what is ignored has no gradient, whatever its logits are
        logits = jnp.where(ignored[..., None], 0.0, logits)
    logs = jax.nn.log_softmax(logits, axis=-1)
    # A negative label counts from the end, and one that is out of range gives NaN.
    loss = -jnp.take_along_axis(logs, labels[..., None], axis=-1, mode="fill")[..., 0]
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * jnp.mean(logs, axis=-1)
    if z_loss:
        loss = loss + z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return loss if ignore_index is None else jnp.where(ignored, 0.0, loss)
