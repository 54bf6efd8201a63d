"""Feed-forward networks."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from .. import ops
from ._adopt import adopt
from ._arrays import is_float
from ._linear import Linear


# The very same functions: they are leaves of the tree.
_DEFAULTS = inspect.signature(eqx.nn.MLP.__init__).parameters


class MLP(eqx.nn.MLP):
    """`equinox.nn.MLP` of [`eqxcallback.nn.Linear`][]. The same constructor, fields and call. `jax.nn.gelu`, as it is or in a
    `functools.partial`, is computed by [`eqxcallback.ops.gelu`][].
    """

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
        - `implementation`: of the layers and of GELU; see [`eqxcallback.Op.using`][].
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

    def __call__(self, x: Array, *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `x`: an array of shape `(in_size,)`, or `()` if `in_size="scalar"`.
        - `key`: ignored, as in `equinox.nn.MLP`.

        **Returns:** an array of shape `(out_size,)`, or `()` if `out_size="scalar"`.
        """
        given = {"activation": self.activation, "final_activation": self.final_activation}
        own = {name: _as_op(activation, self.implementation) for name, activation in given.items()}
        mlp: Any = super() if own == given else adopt(eqx.nn.MLP, self, **own)
        return mlp.__call__(x, key=key)


def _as_op(activation: Callable[..., Array], implementation: ops.Implementation) -> Callable[..., Array]:
    """Return a function that computes the same by an op, or the activation itself."""
    partial = activation if isinstance(activation, functools.partial) else functools.partial(activation)
    if partial.func is not jax.nn.gelu or partial.args or partial.keywords.keys() - {"approximate"}:
        return activation

    def gelu(x: Array) -> Array:
        if not is_float(x.dtype):  # an integer, or a complex number, which the op does not take
            return activation(x)
        return ops.gelu(x, **partial.keywords, implementation=implementation)

    return gelu
