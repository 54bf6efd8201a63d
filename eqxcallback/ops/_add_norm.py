"""A residual connection and the norm that follows it, in one pass."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import reference
from .._checks import check, check_floats, epsilon
from ..kernel import NativeKernel
from ..kernels import host
from ..op import Implementation, Op
from ._run import run


_add_rms_norm = Op(
    "add_rms_norm",
    kernels={"cpu": NativeKernel("add_rms_norm", aliases={"residual": 1})},
    reference=reference.add_rms_norm,
    batching={"x": "batched", "residual": "batched", "weight": "shared"},
    alternatives={"cpu": (host.ADD_RMS_NORM,), "cuda": (host.ADD_RMS_NORM,)},
)


def add_rms_norm(
    x: Float[Array, "*batch size"],
    residual: Float[Array, "*batch size"],
    weight: Float[Array, " size"] | None = None,
    *,
    eps: float = 1e-5,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "*batch size"], Float[Array, "*batch size"]]:
    r"""$s = x + r$, and [`eqxcallback.ops.rms_norm`][] of it.

    **Arguments:**

    - `x`: an array of shape `(*batch, size)`.
    - `residual`: $r$, the same. A kernel writes $s$ over it where XLA lets it.
    - `weight`: of the norm, of shape `(size,)`.
    - `eps`: added to the mean of the squares.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** the norm of $s$, and $s$, both of the shape and dtype of `x`. The norm is that of $s$ as it is returned, rounded
    to its dtype: the same as of the two steps.
    """
    name = "add_rms_norm"
    x, residual = jnp.asarray(x), jnp.asarray(residual)
    check_floats(name, x=x, residual=residual)
    check(x.ndim > 0, name, "x with at least one axis", x=x)
    check(x.shape == residual.shape, name, "x and residual of one shape", x=x, residual=residual)
    if weight is None:
        return run(_add_rms_norm, x, residual, eps=epsilon(name, eps), implementation=implementation)
    weight = jnp.asarray(weight)
    check(weight.shape == x.shape[-1:], name, "weight of the shape of the last axis of x", weight=weight, x=x)
    wide = weight.astype(reference.wide(x.dtype))
    return run(_add_rms_norm, x, residual, wide, eps=epsilon(name, eps), implementation=implementation)
