"""Normalisation."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import kernels, reference
from .._checks import check, check_floats, epsilon
from ..kernel import NativeKernel
from ..kernels import host
from ..op import Implementation, Op
from ._run import run


_rms_norm = Op(
    "rms_norm",
    kernels={"cpu": NativeKernel("rms_norm"), "cuda": kernels.RMS_NORM},
    reference=reference.rms_norm,
    batching={"x": "batched", "weight": "shared"},
    backward={"cpu": NativeKernel("rms_norm_backward"), "cuda": kernels.RMS_NORM_BACKWARD},
    backward_reads_results=False,
    alternatives={"cpu": (host.RMS_NORM,), "cuda": (host.RMS_NORM,)},
)
_layer_norm = Op(
    "layer_norm",
    kernels={"cpu": NativeKernel("layer_norm"), "cuda": kernels.LAYER_NORM},
    reference=reference.layer_norm,
    batching={"x": "batched", "weight": "shared", "bias": "shared"},
    backward={"cpu": NativeKernel("layer_norm_backward"), "cuda": kernels.LAYER_NORM_BACKWARD},
    backward_reads_results=False,
    alternatives={"cpu": (host.LAYER_NORM,), "cuda": (host.LAYER_NORM,)},
)
# To a native kernel a bias without a weight is a second operand, as a weight is.
_layer_norm_bias = dataclasses.replace(
    _layer_norm,
    kernels={"cpu": NativeKernel("layer_norm_bias"), "cuda": kernels.LAYER_NORM},
    backward={"cpu": NativeKernel("layer_norm_bias_backward"), "cuda": kernels.LAYER_NORM_BACKWARD},
)


def rms_norm(
    x: Float[Array, "*batch size"],
    weight: Float[Array, " size"] | None = None,
    *,
    eps: float = 1e-5,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch size"]:
    r"""$\frac{x}{\sqrt{\varepsilon + \frac{1}{n}\Vert x \Vert^2_2}} \gamma$ over the last axis, computed in f32.

    **Arguments:**

    - `x`: an array of shape `(*batch, size)`. f32, bf16 and f16 run the kernel, other dtypes the reference.
    - `weight`: $\gamma$, of shape `(size,)`.
    - `eps`: $\varepsilon$, added to the mean of the squares.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of the shape and dtype of `x`.

    ??? cite

        [Root Mean Square Layer Normalization](https://arxiv.org/abs/1910.07467)
    """
    x = jnp.asarray(x)
    check_floats("rms_norm", x=x)
    check(x.ndim > 0, "rms_norm", "x with at least one axis", x=x)
    if weight is None:
        return run(_rms_norm, x, eps=epsilon("rms_norm", eps), implementation=implementation)
    weight = jnp.asarray(weight)
    check(weight.shape == x.shape[-1:], "rms_norm", "weight of the shape of the last axis of x", weight=weight, x=x)
    return run(
        _rms_norm,
        x,
        weight.astype(reference.wide(x.dtype)),
        eps=epsilon("rms_norm", eps),
        implementation=implementation,
    )


def layer_norm(
    x: Float[Array, "*batch size"],
    weight: Float[Array, " size"] | None = None,
    bias: Float[Array, " size"] | None = None,
    *,
    eps: float = 1e-5,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch size"]:
    r"""$\frac{x - \mathbb{E}[x]}{\sqrt{\mathrm{Var}[x] + \varepsilon}} \gamma + \beta$ over the last axis, computed in f32.

    **Arguments:**

    - `x`: an array of shape `(*batch, size)`. f32, bf16 and f16 run the kernel, other dtypes the reference.
    - `weight`, `bias`: $\gamma$ and $\beta$, of shape `(size,)`.
    - `eps`: $\varepsilon$, added to the variance.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of the shape and dtype of `x`.

    ??? cite

        [Layer Normalization](https://arxiv.org/abs/1607.06450)
    """
    x = jnp.asarray(x)
    check_floats("layer_norm", x=x)
    check(x.ndim > 0, "layer_norm", "x with at least one axis", x=x)
    wide = reference.wide(x.dtype)
    parameters = {"weight": weight, "bias": bias}
    for name, parameter in parameters.items():
        if parameter is not None:
            parameter = jnp.asarray(parameter)
            check(
                parameter.shape == x.shape[-1:],
                "layer_norm",
                f"{name} of the shape of the last axis of x",
                **{name: parameter},
                x=x,
            )
            parameters[name] = parameter.astype(wide)
    op = _layer_norm_bias if weight is None and bias is not None else _layer_norm
    return run(
        op, x, parameters["weight"], parameters["bias"], eps=epsilon("layer_norm", eps), implementation=implementation
    )
