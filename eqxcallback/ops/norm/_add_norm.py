"""A residual connection and the norm that follows it, in one pass."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import AnyArray, AnyNumber, check, check_floats, epsilon
from ...kernel import NativeKernel
from ...transform import Implementation, Op
from .._precision import wide
from .._supports import floats
from . import _cuda, _numpy, _reference


_NATIVE = NativeKernel("add_rms_norm", aliases={"residual": 1}, attributes=("eps", "present"), supports=floats)
_add_rms_norm = Op(
    "add_rms_norm",
    kernels={"cpu": (_NATIVE, _numpy.ADD_RMS_NORM), "cuda": (_cuda.ADD_NORM, _numpy.ADD_RMS_NORM)},
    reference=_reference.add_rms_norm,
    vmap_method={"x": "broadcast_all", "residual": "broadcast_all", "weight": "threads"},
    backward={"cuda": _cuda.ADD_NORM_BACKWARD},
    backward_ignores=["x", "residual", 0],  # it reads the sum
    sharding="... _, ... _, _ -> ... _, ... _",
)


def add_rms_norm(
    x: Float[AnyArray, "*batch size"],
    residual: Float[AnyArray, "*batch size"],
    weight: Float[AnyArray, " size"] | None = None,
    *,
    eps: AnyNumber = 1e-5,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "*batch size"], Float[Array, "*batch size"]]:
    r"""$s = x + r$, and [`eqxcallback.ops.rms_norm`][] of it.

    **Arguments:**

    - `x`: an array of shape `(*batch, size)`.
    - `residual`: $r$, the same. On a CPU the kernel writes $s$ over it where XLA lets it.
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
    if weight is not None:
        weight = jnp.asarray(weight)
        check(weight.shape == x.shape[-1:], name, "weight of the shape of the last axis of x", weight=weight, x=x)
        check_floats(name, weight=weight)
        weight = weight.astype(wide(x.dtype))
    return _add_rms_norm.using(implementation)(x, residual, weight, eps=epsilon(name, eps))
