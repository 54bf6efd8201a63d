"""Linear layers over weights in int8, with a scale for each output feature."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from ...core import AnyArray, check, check_floats, check_one_of
from ...kernel import NativeKernel
from ...transform import Implementation, Op
from .._precision import wide
from .._supports import floats
from . import _jax, _numpy, _reference, _reference_quantized


_int8_linear = Op(
    "int8_linear",
    kernels={
        "cpu": (NativeKernel("int8_linear", supports=floats), _numpy.INT8_LINEAR),
        "cuda": (_jax.INT8_LINEAR, _numpy.INT8_LINEAR),
    },
    backward={"cuda": _jax.INT8_LINEAR_BACKWARD},
    reference=_reference.int8_linear,
    vmap_method={"x": "broadcast_all", "weight": "threads", "scale": "threads"},
    sharding="... i, o i, o -> ... o",
)

Activations = Literal["exact", "int8"]
"""In which numbers a quantised layer multiplies its input: as it comes, or rounded to 8 bits, with a scale for each row."""


def int8_linear(
    x: Float[AnyArray, "*batch in_features"],
    weight: Int8[AnyArray, "out_features in_features"],
    scale: Float[AnyArray, " out_features"],
    *,
    activations: Activations = "exact",
    implementation: Implementation = "auto",
) -> Float[Array, "*batch out_features"]:
    """`(x @ weight.T) * scale`, computed in f32.

    **Arguments:**

    - `x`: an array of shape `(*batch, in_features)`.
    - `weight`: int8, of shape `(out_features, in_features)`.
    - `scale`: of shape `(out_features,)`.
    - `activations`: `"int8"` quantizes each row of `x` to 255 levels, multiples of a 127th of its largest absolute value, and
        multiplies integers: several times as fast for many rows on a CPU with VNNI. What it costs in quality is in
        [Linear layers](../linear.md).
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of shape `(*batch, out_features)` and the dtype of `x`.

    There are derivatives with respect to `x` and `scale`; integers have none, and quantizing has that of the identity.
    """
    name = "int8_linear"
    x, weight, scale = jnp.asarray(x), jnp.asarray(weight), jnp.asarray(scale)
    check_one_of(name, "activations", activations, get_args(Activations))
    check_floats(name, x=x)
    check_floats(name, scale=scale)
    fits = weight.dtype == jnp.int8 and weight.ndim == 2 and x.ndim > 0 and x.shape[-1] == weight.shape[-1]
    check(fits, name, "weight in int8, of shape (out_features, in_features) for the last axis of x", x=x, weight=weight)
    check(scale.shape == weight.shape[:1], name, "scale of shape (out_features,)", scale=scale, weight=weight)
    return _int8_linear.using(implementation)(x, weight, scale.astype(wide(x.dtype)), activations=activations)


def quantize_int8(
    weight: Float[AnyArray, "out_features in_features"],
) -> tuple[Int8[Array, "out_features in_features"], Float[Array, " out_features"]]:
    """The nearest `weight` and `scale` that [`eqxcallback.ops.int8_linear`][] takes: `weight * scale[:, None]` is off by half a
    scale at most, which is the largest absolute value of the row over 127.
    """
    weight = jnp.asarray(weight)
    check_floats("quantize_int8", weight=weight)
    check(weight.ndim == 2, "quantize_int8", "weight of shape (out_features, in_features)", weight=weight)
    return _reference_quantized.quantize_int8(weight)
