"""The gradient of logits, of all classes or of some, from what the loss has of each row."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array


class Rows(NamedTuple):
    r"""The numbers of each row that the gradients of its logits are made of. With $p = \mathrm{softmax}(z)$, the label $y$, class
    weights $w$, smoothing $s$, and the cotangent $g$ of the loss, the gradient of a logit is
    $g ((1 - s) w_y + s \bar w + 2 \zeta l) p_j - g (1 - s) w_y [j = y] - g s w_j / n$, where $l$ is the log-sum-exp and
    $\zeta$ the factor of its square.

    **Attributes:**

    - `label`: the class.
    - `highest`, `lse`, `inverse`: the highest logit, the log-sum-exp, and 1 over the sum of exponentials of what logits are below
        the highest one.
    - `of_chosen`, `of_label`, `of_each`, `of_sum`: $g (1 - s)$, that times $w_y$, $g s / n$ or `None` for 0, and the factor of
        $p_j$.
    - `ignored`: whether the row has no loss, or `None` if all have one.
    """

    label: Array
    highest: Array
    lse: Array
    inverse: Array
    of_chosen: Array
    of_label: Array
    of_each: Array | None
    of_sum: Array
    ignored: Array | None

    @classmethod
    def of(
        cls,
        labels: Array,
        of_loss: Array,
        highest: Array,
        total: Array,
        size: int,
        class_weights: Array | None,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        ignore_index: int | None = None,
    ) -> "Rows":
        lse = highest + jnp.log(total)
        label = jnp.where(labels < 0, labels + size, labels)
        counts = (label >= 0) & (label < size)
        ignored = None if ignore_index is None else labels == ignore_index
        of_loss = jnp.where(counts if ignored is None else counts & ~ignored, of_loss, 0.0)
        label_weights, mean = jnp.ones_like(of_loss), 1.0
        if class_weights is not None:
            label_weights, mean = class_weights.at[labels].get(mode="fill", fill_value=0.0), jnp.mean(class_weights)
        of_chosen = of_loss * (1 - label_smoothing)
        of_label = of_chosen * label_weights
        of_sum = of_label + of_loss * (label_smoothing * mean)
        if z_loss:
            of_sum = of_sum + of_loss * (2 * z_loss * lse)
        inverse = 1 / jnp.where(total == 0, 1.0, total)
        of_each = of_loss * (label_smoothing / max(size, 1)) if label_smoothing else None
        return cls(label, highest, lse, inverse, of_chosen, of_label, of_each, of_sum, ignored)

    def counted(self, x: Array) -> Array:
        """Return `x`, but zeros in rows that are ignored, which have no gradient, whatever is in `x`."""
        return x if self.ignored is None else jnp.where(self.ignored[..., None], jnp.zeros_like(x), x)

    def gradient(
        self, z: Array, first: Any, class_weights: Array | None, soft_cap: float | None
    ) -> tuple[Array, Array | None]:
        """The gradient of the logits of some classes, before the soft cap, and of the weights of these classes.

        **Arguments:**

        - `z`: the logits, after the soft cap.
        - `first`: the first of the classes.
        - `class_weights`: of these classes.
        """
        here = first + jax.lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1) == self.label[..., None]
        every = 0.0 if self.of_each is None else self.of_each[..., None]
        d_class_weights = None
        if class_weights is not None:
            every = every * jnp.broadcast_to(class_weights, z.shape)
            below = self.lse[..., None] - z
            terms = jnp.where(here, self.of_chosen[..., None] * below, 0.0)
            if self.of_each is not None:
                terms = terms + self.of_each[..., None] * below
            d_class_weights = terms.sum(range(self.label.ndim))
        of_softmax = (self.of_sum * self.inverse)[..., None] * jnp.exp(z - self.highest[..., None])
        d_z = of_softmax - jnp.where(here, self.of_label[..., None], 0.0) - every
        return d_z if soft_cap is None else d_z * (1 - (z / soft_cap) ** 2), d_class_weights
