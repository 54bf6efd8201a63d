"""Normalisation."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import AnyArray, AnyNumber, check, check_floats, epsilon
from ...kernel import NativeKernel
from ...transform import Implementation, Op
from .._precision import wide
from .._supports import floats
from . import _cuda, _numpy, _reference


def _norm_op(name: str) -> Op:
    native = NativeKernel("norm", attributes=("eps", "center", "present"), supports=floats)
    native_backward = NativeKernel(
        "norm_backward", attributes=("eps", "center", "present", "needs_grad"), supports=floats
    )
    return Op(
        name,
        kernels={"cpu": (native, _numpy.NORM), "cuda": (_cuda.NORM, _numpy.NORM)},
        reference=_reference.norm,
        vmap_method={"x": "broadcast_all", "weight": "threads", "bias": "threads"},
        backward={"cpu": native_backward, "cuda": _cuda.NORM_BACKWARD},
        backward_reads_results=False,
        sharding="... _, _, _ -> ... _",
    )


_rms_norm, _layer_norm = _norm_op("rms_norm"), _norm_op("layer_norm")


def rms_norm(
    x: Float[AnyArray, "*batch size"],
    weight: Float[AnyArray, " size"] | None = None,
    bias: Float[AnyArray, " size"] | None = None,
    *,
    eps: AnyNumber = 1e-5,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch size"]:
    r"""$\frac{x}{\sqrt{\varepsilon + \frac{1}{n}\Vert x \Vert^2_2}} \gamma + \beta$ over the last axis, computed in f32.

    **Arguments:**

    - `x`: an array of shape `(*batch, size)`. f32, bf16 and f16 run the kernel, other dtypes the reference.
    - `weight`, `bias`: $\gamma$ and $\beta$, of shape `(size,)`.
    - `eps`: $\varepsilon$, added to the mean of the squares.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of the shape and dtype of `x`.

    ??? cite

        [Root Mean Square Layer Normalization](https://arxiv.org/abs/1910.07467)
    """
    return _normalize(_rms_norm, x, weight, bias, eps, implementation, center=False)


def layer_norm(
    x: Float[AnyArray, "*batch size"],
    weight: Float[AnyArray, " size"] | None = None,
    bias: Float[AnyArray, " size"] | None = None,
    *,
    eps: AnyNumber = 1e-5,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch size"]:
    r"""$\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \varepsilon}} \gamma + \beta$ over the last axis, computed in f32.

    **Arguments:**

    - `x`: an array of shape `(*batch, size)`. f32, bf16 and f16 run the kernel, other dtypes the reference.
    - `weight`, `bias`: $\gamma$ and $\beta$, of shape `(size,)`.
    - `eps`: $\varepsilon$, added to the variance.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of the shape and dtype of `x`.

    ??? cite

        [Layer Normalization](https://arxiv.org/abs/1607.06450)
    """
    return _normalize(_layer_norm, x, weight, bias, eps, implementation, center=True)


def _normalize(
    op: Op,
    x: AnyArray,
    weight: AnyArray | None,
    bias: AnyArray | None,
    eps: AnyNumber,
    implementation: Implementation,
    *,
    center: bool,
) -> Float[Array, "*batch size"]:
    x = jnp.asarray(x)
    check_floats(op.name, x=x)
    check(x.ndim > 0, op.name, "x with at least one axis", x=x)
    parameters = {"weight": weight, "bias": bias}
    for name, parameter in parameters.items():
        if parameter is not None:
            parameter = jnp.asarray(parameter)
            expected = f"{name} of the shape of the last axis of x"
            check(parameter.shape == x.shape[-1:], op.name, expected, **{name: parameter}, x=x)
            check_floats(op.name, **{name: parameter})
            parameters[name] = parameter.astype(wide(x.dtype))
    return op.using(implementation)(x, *parameters.values(), eps=epsilon(op.name, eps), center=center)
