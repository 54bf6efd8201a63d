"""Cross-entropy of a softmax against a target for every class."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._precision import wide


def cross_entropy_of_targets(
    logits: Float[Array, "*batch size"], targets: Float[Array, "*batch size"], *, z_loss: float = 0.0
) -> Float[Array, "*batch"]:
    logits = logits.astype(wide(logits.dtype))
    logs = jax.nn.log_softmax(logits, axis=-1)
    # A class that is hidden by a logit of -inf may have no target: zero times infinity would be NaN.
    logs = jnp.where((targets == 0) & (logs == -jnp.inf), 0.0, logs)
    loss = -jnp.sum(targets * logs, axis=-1)
    return loss + z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1)) if z_loss else loss


def weighted_targets(
    targets: Float[Array, "*batch size"], class_weights: Float[Array, " size"] | None, label_smoothing: float
) -> Float[Array, "*batch size"]:
    """A part of each target belongs to all classes alike, and each class has its weight."""
    if label_smoothing:
        targets = (1 - label_smoothing) * targets + label_smoothing / max(targets.shape[-1], 1)
    return targets if class_weights is None else targets * jnp.broadcast_to(class_weights, targets.shape)


def targets_of_labels(
    labels: Int[Array, "*batch"], class_weights: Float[Array, " size"], label_smoothing: float
) -> Float[Array, "*batch size"]:
    """One that is out of range has NaN."""
    size = class_weights.shape[0]
    index = jnp.where(labels < 0, labels + size, labels)[..., None]
    chosen = jax.lax.broadcasted_iota(jnp.int32, (*labels.shape, size), labels.ndim) == index
    targets = weighted_targets(chosen.astype(class_weights.dtype), class_weights, label_smoothing)
    return jnp.where((index >= 0) & (index < size), targets, jnp.nan)
