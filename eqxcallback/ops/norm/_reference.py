"""Normalisation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._precision import wide


def norm(
    x: Float[Array, "*batch size"],
    weight: Float[Array, " size"] | None = None,
    bias: Float[Array, " size"] | None = None,
    *,
    eps: float,
    center: bool,
) -> Array:
    """Layer norm, or with `center=False` RMS norm."""
    y, small = _squarable(x.astype(wide(x.dtype)), eps)
    if center:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + small)
    if weight is not None:
        y = y * jnp.broadcast_to(weight.astype(y.dtype), y.shape)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
    return y.astype(x.dtype)


def rms_norm(x: Array, weight: Array | None = None, bias: Array | None = None, *, eps: float) -> Array:
    return norm(x, weight, bias, eps=eps, center=False)


def layer_norm(x: Array, weight: Array | None = None, bias: Array | None = None, *, eps: float) -> Array:
    return norm(x, weight, bias, eps=eps, center=True)


def _squarable(x: Array, eps: float) -> tuple[Array, Array]:
    """`x` and `eps` of the same norm, whose rows have squares that do not overflow."""
    highest = jnp.max(jnp.abs(jax.lax.stop_gradient(x)), axis=-1, keepdims=True, initial=0)
    exponent = jnp.finfo(x.dtype).maxexp
    # No derivative: what a row is divided by does not change its norm. One that is not finite stays as it is. Beyond the
    # limit the power of the variance that is in the derivative would be subnormal, which to XLA is zero.
    large = (highest > 2.0 ** (5 * exponent // 16)) & jnp.isfinite(highest)
    power = jnp.where(large, jnp.frexp(highest)[1], 0)
    # By a power of two, which is exact: of a row of one value nothing is left. In two steps: the inverse of the largest one is
    # subnormal as well. The new eps stays so large that its power is finite.
    half, one = power // 2, jnp.ones_like(highest)
    first, second = jnp.ldexp(one, -half), jnp.ldexp(one, half - power)
    small = jnp.maximum(eps * first * second * first * second, 2.0 ** -(5 * exponent // 8))
    return x * first * second, jnp.where(large, small, eps)


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
