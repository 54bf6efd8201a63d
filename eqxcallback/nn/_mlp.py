"""Feed-forward networks."""

import inspect
from collections.abc import Callable
from typing import Literal

import equinox as eqx
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from .. import ops
from ._adopt import adopt
from ._linear import Linear


# The very same functions: they are leaves of the tree.
_DEFAULTS = inspect.signature(eqx.nn.MLP.__init__).parameters


class MLP(eqx.nn.MLP):
    """`equinox.nn.MLP` of [`eqxcallback.nn.Linear`][]. The same constructor, fields and call."""

    implementation: ops.Implementation = eqx.field(static=True, default="auto")

    def __init__(
        self,
        in_size: int | Literal["scalar"],
        out_size: int | Literal["scalar"],
        width_size: int,
        depth: int,
        activation: Callable[..., Array] = _DEFAULTS["activation"].default,
        final_activation: Callable[..., Array] = _DEFAULTS["final_activation"].default,
        use_bias: bool = True,
        use_final_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        scan: bool = False,
        key: PRNGKeyArray,
        implementation: ops.Implementation = "auto",
    ):
        """**Arguments:**

        - `in_size`, `out_size`: the sizes of the input and of the output, or `"scalar"`, for the shape `()`.
        - `width_size`: of the hidden layers.
        - `depth`: how many activations there are before the output layer: with 0 it is the only layer.
        - `activation`: after each hidden layer; by default ReLU.
        - `final_activation`: after the output layer; by default none. Both are functions of one number, and have one copy of
            what they learn for each.
        - `use_bias`, `use_final_bias`: whether the hidden layers and the output layer have biases.
        - `dtype`: of all weights; by default JAX's default float.
        - `scan`: whether the hidden layers are one with stacked weights, which is compiled once.
        - `key`: initialises the weights.
        - `implementation`: of the layers; see [`eqxcallback.Op.using`][].
        """
        super().__init__(
            in_size,
            out_size,
            width_size,
            depth,
            activation,
            final_activation,
            use_bias,
            use_final_bias,
            dtype,
            scan=scan,
            key=key,
        )
        self.layers = tuple(adopt(Linear, layer, implementation=implementation) for layer in self.layers)
        self.implementation = implementation
