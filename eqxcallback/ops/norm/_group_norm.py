"""Normalisation of groups of channels."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import AnyArray, AnyInt, AnyNumber, check, check_floats, epsilon, integer
from ...kernel import NativeKernel
from ...transform import Implementation, Op
from .._precision import wide
from .._supports import floats
from . import _cuda_group_norm, _cuda_group_norm_parts, _numpy, _reference


_NATIVE = NativeKernel("group_norm", attributes=("eps", "groups", "present"), supports=floats)
_NATIVE_BACKWARD = NativeKernel(
    "group_norm_backward", attributes=("eps", "groups", "present", "needs_grad"), supports=floats
)
_group_norm = Op(
    "group_norm",
    kernels={
        "cpu": (_NATIVE, _numpy.GROUP_NORM),
        "cuda": (_cuda_group_norm_parts.GROUP_NORM, _cuda_group_norm.GROUP_NORM, _numpy.GROUP_NORM),
    },
    reference=_reference.group_norm,
    vmap_method={"x": "broadcast_all", "weight": "threads", "bias": "threads"},
    backward={
        "cpu": _NATIVE_BACKWARD,
        "cuda": (_cuda_group_norm_parts.GROUP_NORM_BACKWARD, _cuda_group_norm.GROUP_NORM_BACKWARD),
    },
    backward_reads_results=False,
    sharding="... _ _, _, _ -> ... _ _",
)


def group_norm(
    x: Float[AnyArray, "*batch channels size"],
    weight: Float[AnyArray, " channels"] | None = None,
    bias: Float[AnyArray, " channels"] | None = None,
    *,
    groups: AnyInt,
    eps: AnyNumber = 1e-5,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch channels size"]:
    r"""$\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \varepsilon}} \gamma + \beta$ over each group of neighbouring channels,
    computed in f32.

    **Arguments:**

    - `x`: an array of shape `(*batch, channels, size)`. Several spatial axes are one here: reshape them.
    - `weight`, `bias`: $\gamma$ and $\beta$, of shape `(channels,)`.
    - `groups`: how many; a divisor of `channels`.
    - `eps`: $\varepsilon$, added to the variance.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of the shape and dtype of `x`.

    ??? cite

        [Group Normalization](https://arxiv.org/abs/1803.08494)
    """
    name = "group_norm"
    x = jnp.asarray(x)
    check_floats(name, x=x)
    check(x.ndim >= 2, name, "x of shape (*batch, channels, size)", x=x)
    channels = x.shape[-2]
    groups = integer(name, "groups to be a positive integer", groups, least=1)
    check(channels % groups == 0, name, "groups to be a divisor of the channels of x", groups=groups, x=x)
    parameters = {"weight": weight, "bias": bias}
    for key, parameter in parameters.items():
        if parameter is not None:
            parameter = jnp.asarray(parameter)
            check(parameter.shape == (channels,), name, f"{key} of shape (channels,)", **{key: parameter}, x=x)
            check_floats(name, **{key: parameter})
            parameters[key] = parameter.astype(wide(x.dtype))
    return _group_norm.using(implementation)(x, *parameters.values(), groups=groups, eps=epsilon(name, eps))
