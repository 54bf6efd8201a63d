"""Normalisation of groups of channels."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import reference
from .._checks import check, check_floats, epsilon, integer
from ..kernel import NativeKernel
from ..kernels import host
from ..op import Implementation, Op
from ._run import run


_group_norm = Op(
    "group_norm",
    kernels={"cpu": NativeKernel("group_norm")},
    reference=reference.group_norm,
    batching={"x": "batched", "weight": "shared", "bias": "shared"},
    alternatives={"cpu": (host.GROUP_NORM,), "cuda": (host.GROUP_NORM,)},
)
# To a native kernel a bias without a weight is a second operand, as a weight is.
_group_norm_bias = dataclasses.replace(_group_norm, kernels={"cpu": NativeKernel("group_norm_bias")})


def group_norm(
    x: Float[Array, "*batch channels size"],
    weight: Float[Array, " channels"] | None = None,
    bias: Float[Array, " channels"] | None = None,
    *,
    groups: int,
    eps: float = 1e-5,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch channels size"]:
    r"""$\frac{x - \mathbb{E}[x]}{\sqrt{\mathrm{Var}[x] + \varepsilon}} \gamma + \beta$ over each group of neighbouring channels,
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
            parameters[key] = parameter.astype(reference.wide(x.dtype))
    return run(
        _group_norm_bias if weight is None and bias is not None else _group_norm,
        x,
        parameters["weight"],
        parameters["bias"],
        groups=groups,
        eps=epsilon(name, eps),
        implementation=implementation,
    )
