"""A sum and its norm."""

from jaxtyping import Array, Float

from ._norm import rms_norm


def add_rms_norm(
    x: Float[Array, "*batch size"],
    residual: Float[Array, "*batch size"],
    weight: Float[Array, " size"] | None = None,
    *,
    eps: float,
) -> tuple[Array, Array]:
    """The norm is of the sum as it is returned, which is rounded."""
    total = x + residual
    return rms_norm(total, weight, eps=eps), total
