"""Normalisation."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import reference
from ..kernel import NativeKernel
from ..op import Op
from ._checks import check, check_floats, run


_rms_norm = Op(
    "rms_norm",
    kernels={"cpu": NativeKernel("rms_norm")},
    reference=reference.rms_norm,
    batching={"x": "batched", "weight": "shared"},
)


def rms_norm(
    x: Float[Array, "*batch size"], weight: Float[Array, " size"] | None = None, *, eps: float = 1e-5
) -> Float[Array, "*batch size"]:
    r"""$\frac{x}{\sqrt{\varepsilon + \frac{1}{n}\Vert x \Vert^2_2}} \gamma$ over the last axis, computed in f32.

    **Arguments:**

    - `x`: an array of shape `(*batch, size)`. f32 and bf16 run the kernel, other dtypes the reference.
    - `weight`: $\gamma$, of shape `(size,)`.
    - `eps`: $\varepsilon$, added to the mean of the squares.

    **Returns:** an array of the shape and dtype of `x`.

    ??? cite

        [Root Mean Square Layer Normalization](https://arxiv.org/abs/1910.07467)
    """
    x = jnp.asarray(x)
    check_floats("rms_norm", x=x)
    check(x.ndim > 0, "rms_norm", "x with at least one axis", x=x)
    if weight is None:
        return run(_rms_norm, x, eps=float(eps))
    weight = jnp.asarray(weight)
    check(weight.shape == x.shape[-1:], "rms_norm", "weight of the shape of the last axis of x", weight=weight, x=x)
    return run(_rms_norm, x, weight.astype(reference.wide(x.dtype)), eps=float(eps))
