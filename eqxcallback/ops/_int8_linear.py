"""Linear layers over weights in int8, with a scale for each output feature."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from .. import reference
from .._checks import check, check_floats
from ..kernel import NativeKernel
from ..kernels import host
from ..op import Implementation, Op
from ._run import run


_int8_linear = Op(
    "int8_linear",
    kernels={"cpu": NativeKernel("int8_linear")},
    reference=reference.int8_linear,
    batching={"x": "batched", "weight": "shared", "scale": "shared"},
    alternatives={"cpu": (host.INT8_LINEAR,), "cuda": (host.INT8_LINEAR,)},
)


def int8_linear(
    x: Float[Array, "*batch in_features"],
    weight: Int8[Array, "out_features in_features"],
    scale: Float[Array, " out_features"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch out_features"]:
    """`(x @ weight.T) * scale`, computed in f32.

    **Arguments:**

    - `x`: an array of shape `(*batch, in_features)`.
    - `weight`: int8, of shape `(out_features, in_features)`.
    - `scale`: of shape `(out_features,)`.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of shape `(*batch, out_features)` and the dtype of `x`.

    There are derivatives with respect to `x` and `scale`; integers have none.
    """
    name = "int8_linear"
    x, weight, scale = jnp.asarray(x), jnp.asarray(weight), jnp.asarray(scale)
    check_floats(name, x=x)
    check_floats(name, scale=scale)
    fits = weight.dtype == jnp.int8 and weight.ndim == 2 and x.ndim > 0 and x.shape[-1] == weight.shape[-1]
    check(fits, name, "weight in int8, of shape (out_features, in_features) for the last axis of x", x=x, weight=weight)
    check(scale.shape == weight.shape[:1], name, "scale of shape (out_features,)", scale=scale, weight=weight)
    return run(_int8_linear, x, weight, scale.astype(reference.wide(x.dtype)), implementation=implementation)


def quantize_int8(
    weight: Float[Array, "out_features in_features"],
) -> tuple[Int8[Array, "out_features in_features"], Float[Array, " out_features"]]:
    """The nearest `weight` and `scale` that [`eqxcallback.ops.int8_linear`][] takes: `weight * scale[:, None]` is off by half a
    scale at most, which is the largest absolute value of the row over 127.
    """
    weight = jnp.asarray(weight)
    check_floats("quantize_int8", weight=weight)
    check(weight.ndim == 2, "quantize_int8", "weight of shape (out_features, in_features)", weight=weight)
    return reference.quantize_int8(weight)
