"""Normalisation of groups of channels."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._norm import layer_norm
from ._precision import wide


def group_norm(
    x: Float[Array, "*batch channels size"],
    weight: Float[Array, " channels"] | None = None,
    bias: Float[Array, " channels"] | None = None,
    *,
    groups: int,
    eps: float,
) -> Float[Array, "*batch channels size"]:
    *batch, channels, size = x.shape
    y = x.astype(wide(x.dtype)).reshape(*batch, groups, channels // groups * size)
    y = layer_norm(y, eps=eps).reshape(x.shape)
    if weight is not None:
        y = y * jnp.broadcast_to(weight.astype(y.dtype)[:, None], y.shape)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(y.dtype)[:, None], y.shape)
    return y.astype(x.dtype)
