"""Linear layers."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from .. import ops
from ..core import Value
from ._arrays import ARRAYS, are_floats, is_float
from ._compiled import compiled


def check_linear(who: str, layer: Any) -> None:
    if not isinstance(layer, eqx.nn.Linear):
        raise TypeError(f"{who}: expected an equinox.nn.Linear; got {type(layer).__name__}.")


class Linear(eqx.nn.Linear):
    """`equinox.nn.Linear`, which sums f16 and bf16 in f32 and rounds once, after the bias.

    The same constructor, fields and call. A batch goes through `jax.vmap`, which is one product for all of it.
    """

    implementation: ops.Implementation = eqx.field(static=True, default="auto")

    def __init__(
        self,
        in_features: int | Literal["scalar"],
        out_features: int | Literal["scalar"],
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        implementation: ops.Implementation = "auto",
    ):
        """**Arguments:**

        - `in_features`, `out_features`: the sizes of the input and of the output, or `"scalar"`, for the shape `()`.
        - `use_bias`: whether to add a bias.
        - `dtype`: of the weight and the bias; by default JAX's default float.
        - `key`: initialises them.
        - `implementation`: see [`eqxcallback.Op.using`][].
        """
        super().__init__(in_features, out_features, use_bias, dtype, key=key)
        self.implementation = implementation

    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `x`: an array of shape `(in_features,)`, or `()` if `in_features="scalar"`.
        - `key`: ignored, as in `equinox.nn.Linear`.

        **Returns:** an array of shape `(out_features,)`, or `()` if `out_features="scalar"`.
        """
        equinox: Any = super()
        weight, bias = self.weight, self.bias
        parameters = (weight,) if bias is None else (weight, bias)
        if not are_floats(*parameters) or not _fits(x, weight, bias, self.in_features, self.out_features):
            return equinox.__call__(x, key=key)
        if not isinstance(x, ARRAYS):
            x = jnp.asarray(x)
        if not is_float(x.dtype) and not is_float(jnp.result_type(x, *parameters)):
            return equinox.__call__(x, key=key)
        is_scalar = self.out_features == "scalar"
        return _linear(x, weight, bias, is_scalar=is_scalar, implementation=self.implementation)


def _fits(x: Value, weight: Value, bias: Value, in_features: object, out_features: object) -> bool:
    shape = () if in_features == "scalar" else weight.shape[1:]
    outputs = weight.shape[:1]
    fits = weight.ndim == 2 and jnp.shape(x) == shape and (bias is None or bias.shape == outputs)
    return fits and (out_features != "scalar" or outputs == (1,)) and (shape != () or weight.shape[1] == 1)


@compiled
@jax.named_scope("eqxcallback.nn.Linear")
def _linear(
    x: Array, weight: Array, bias: Array | None, *, is_scalar: bool, implementation: ops.Implementation
) -> Array:
    dtype = jnp.result_type(x, weight, *(() if bias is None else (bias,)))
    x = jnp.asarray(x, dtype).reshape(weight.shape[1:])
    out = ops.linear(x, weight.astype(dtype), bias, implementation=implementation)
    return out.reshape(()) if is_scalar else out
