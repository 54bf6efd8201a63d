"""Softmax."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from ...core import AnyArray, AnyNumber, Size, check, check_floats, number
from ...kernel import NativeKernel
from ...transform import Implementation, Op
from .._supports import floats
from . import _cuda, _numpy, _reference


_NATIVE = NativeKernel("softmax", attributes=("scale", "present"), supports=floats)
_NATIVE_BACKWARD = NativeKernel("softmax_backward", attributes=("scale", "present", "needs_grad"), supports=floats)
_softmax = Op(
    "softmax",
    kernels={"cpu": (_NATIVE, _numpy.SOFTMAX), "cuda": (_cuda.SOFTMAX, _numpy.SOFTMAX)},
    reference=_reference.softmax,
    vmap_method={"x": "broadcast_all", "mask": "fold"},
    backward={"cpu": _NATIVE_BACKWARD, "cuda": _cuda.SOFTMAX_BACKWARD},
    backward_ignores=["x"],
    sharding="... _, ... _ -> ... _",
)


def softmax(
    x: Float[AnyArray, "*batch size"],
    mask: Bool[ArrayLike, "..."] | None = None,
    *,
    scale: AnyNumber = 1.0,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch size"]:
    r"""$\frac{m_i e^{s x_i}}{\sum_j m_j e^{s x_j}}$ over the last axis, computed in f32.

    It is `jax.nn.softmax(scale * x, where=mask)`, rounded once. The largest element is subtracted before the product with $s$: no
    logit is too large.

    **Arguments:**

    - `x`: an array of shape `(*batch, size)`. f32, bf16 and f16 run the kernel, other dtypes the reference.
    - `mask`: $m$, bool, of a shape that broadcasts to that of `x`: `True` where an element takes part. What does not take part is
        exactly 0, has no gradient, and may be NaN. Axes that the mask lacks, or has the length 1 in front, are shared; an axis of
        length 1 behind others is copied.
    - `scale`: $s$.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of the shape and dtype of `x`. A row is NaN where it has NaN or, times the scale, $\infty$ among what
    takes part, or nothing but $-\infty$. A row of which nothing takes part is 0, and so is its gradient.
    """
    name = "softmax"
    x = jnp.asarray(x)
    check_floats(name, x=x)
    check(x.ndim > 0, name, "x with at least one axis", x=x)
    scale = number(name, "scale to be a finite number", scale, least=-_LARGEST, most=_LARGEST)
    function: Any = _softmax.using(implementation)
    if mask is None:
        return function(x, None, scale=scale)
    mask = jnp.asarray(mask)
    check(
        mask.dtype == jnp.bool_ and _broadcasts(mask.shape, x.shape),
        name,
        "a bool mask that broadcasts to x",
        mask=mask,
        x=x,
    )
    while mask.ndim > 1 and mask.shape[0] == 1:
        mask = mask[0]
    mask = jnp.broadcast_to(mask, x.shape[x.ndim - max(mask.ndim, 1) :])

    def call(x: jax.Array, mask: jax.Array) -> jax.Array:
        return function(x, mask, scale=scale)

    # To the kernel an operand without axes has the innermost ones of the batch. Here they are those that the mask lacks,
    # which it is told if it is mapped.
    for _ in range(x.ndim - mask.ndim):
        call = jax.vmap(call, in_axes=(0, None))
    return call(x, mask)


_LARGEST = float(jnp.finfo(jnp.float32).max)


def _broadcasts(shape: tuple[Size, ...], to: tuple[Size, ...]) -> bool:
    """True if an array of `shape` broadcasts: leading axes may be missing, and any may have the length 1."""
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape[::-1], to[::-1], strict=False))
