"""Linear layers."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .. import ops
from ._arrays import are_floats


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
        dtype: Any = None,
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

    @jax.named_scope("eqxcallback.nn.Linear")
    def __call__(self, x: Array, *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `x`: an array of shape `(in_features,)`, or `()` if `in_features="scalar"`.
        - `key`: ignored, as in `equinox.nn.Linear`.

        **Returns:** an array of shape `(out_features,)`, or `()` if `out_features="scalar"`.
        """
        parameters = (self.weight,) if self.bias is None else (self.weight, self.bias)
        if not are_floats(*parameters) or not self._fits(x):
            return super().__call__(x, key=key)
        dtype = jnp.result_type(x, *parameters)
        if not jnp.issubdtype(dtype, jnp.floating):
            return super().__call__(x, key=key)
        x = jnp.asarray(x, dtype).reshape(self.weight.shape[1:])
        out = ops.linear(x, self.weight.astype(dtype), self.bias, implementation=self.implementation)
        return out.reshape(()) if self.out_features == "scalar" else out

    def _fits(self, x: Any) -> bool:
        shape = () if self.in_features == "scalar" else self.weight.shape[1:]
        outputs = self.weight.shape[:1]
        fits = self.weight.ndim == 2 and jnp.shape(x) == shape and (self.bias is None or self.bias.shape == outputs)
        return (
            fits and (self.out_features != "scalar" or outputs == (1,)) and (shape != () or self.weight.shape[1] == 1)
        )
