"""Feed-forward blocks with a gated activation."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from .. import ops
from ..core import AnyArray, Value, integer
from ._linear import Linear


class SwiGLU(eqx.Module):
    r"""$W_\mathrm{down} (\mathrm{silu}(W_\mathrm{gate} x) \cdot W_\mathrm{up} x)$: the feed-forward block of Llama.

    A batch goes through `jax.vmap`, which is one product for each weight.

    ??? cite

        [GLU Variants Improve Transformer](https://arxiv.org/abs/2002.05202)
    """

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    in_features: int = eqx.field(static=True)
    hidden_features: int = eqx.field(static=True)
    out_features: int = eqx.field(static=True)
    use_bias: bool = eqx.field(static=True)
    implementation: ops.Implementation = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
        implementation: ops.Implementation = "auto",
    ):
        """**Arguments:**

        - `in_features`: the size of the input.
        - `hidden_features`: the size of the gate, and of what it lets through.
        - `out_features`: the size of the output, by default that of the input.
        - `use_bias`: whether the three layers have a bias.
        - `dtype`: of their parameters; by default JAX's default float.
        - `key`: initialises them.
        - `implementation`: of the activation; see [`eqxcallback.Op.using`][].
        """
        out_features = in_features if out_features is None else out_features
        self.in_features, self.hidden_features, self.out_features = _sizes(
            type(self).__name__, in_features=in_features, hidden_features=hidden_features, out_features=out_features
        )
        self.use_bias = use_bias
        layers = _projections(self.in_features, self.hidden_features, self.out_features, use_bias, dtype, key)
        self.gate_proj, self.up_proj, self.down_proj = layers
        self.implementation = implementation

    @jax.named_scope("eqxcallback.nn.SwiGLU")
    def __call__(
        self, x: Float[AnyArray, " in_features"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " out_features"]:
        """**Arguments:**

        - `x`: an array of shape `(in_features,)`.
        - `key`: ignored.

        **Returns:** an array of shape `(out_features,)`.
        """
        del key
        _check_input("SwiGLU", x, self.in_features)
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x), implementation=self.implementation))


class GEGLU(eqx.Module):
    r"""$W_\mathrm{down} (\mathrm{gelu}(W_\mathrm{gate} x) \cdot W_\mathrm{up} x)$: the feed-forward block of T5 and Gemma.

    A batch goes through `jax.vmap`, which is one product for each weight.

    ??? cite

        [GLU Variants Improve Transformer](https://arxiv.org/abs/2002.05202)
    """

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    in_features: int = eqx.field(static=True)
    hidden_features: int = eqx.field(static=True)
    out_features: int = eqx.field(static=True)
    use_bias: bool = eqx.field(static=True)
    approximate: bool = eqx.field(static=True)
    implementation: ops.Implementation = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        use_bias: bool = False,
        approximate: bool = True,
        dtype: DTypeLike | None = None,
        key: PRNGKeyArray,
        implementation: ops.Implementation = "auto",
    ):
        """**Arguments:**

        - `in_features`: the size of the input.
        - `hidden_features`: the size of the gate, and of what it lets through.
        - `out_features`: the size of the output, by default that of the input.
        - `use_bias`: whether the three layers have a bias.
        - `approximate`: whether $\\mathrm{gelu}$ is the one with $\\tanh$, or the exact one.
        - `dtype`: of the parameters; by default JAX's default float.
        - `key`: initialises them.
        - `implementation`: of the activation; see [`eqxcallback.Op.using`][].
        """
        out_features = in_features if out_features is None else out_features
        self.in_features, self.hidden_features, self.out_features = _sizes(
            type(self).__name__, in_features=in_features, hidden_features=hidden_features, out_features=out_features
        )
        self.use_bias, self.approximate = use_bias, approximate
        layers = _projections(self.in_features, self.hidden_features, self.out_features, use_bias, dtype, key)
        self.gate_proj, self.up_proj, self.down_proj = layers
        self.implementation = implementation

    @jax.named_scope("eqxcallback.nn.GEGLU")
    def __call__(
        self, x: Float[AnyArray, " in_features"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " out_features"]:
        """**Arguments:**

        - `x`: an array of shape `(in_features,)`.
        - `key`: ignored.

        **Returns:** an array of shape `(out_features,)`.
        """
        del key
        _check_input("GEGLU", x, self.in_features)
        hidden = ops.geglu(
            self.gate_proj(x), self.up_proj(x), approximate=self.approximate, implementation=self.implementation
        )
        return self.down_proj(hidden)


def _sizes(who: str, **sizes: int) -> tuple[int, ...]:
    return tuple(integer(who, f"{name} to be an integer of at least 0", size, least=0) for name, size in sizes.items())


def _projections(
    in_features: int,
    hidden_features: int,
    out_features: int,
    use_bias: bool,
    dtype: DTypeLike | None,
    key: PRNGKeyArray,
) -> tuple[Linear, Linear, Linear]:
    gate_key, up_key, down_key = jax.random.split(key, 3)
    return (
        Linear(in_features, hidden_features, use_bias, dtype, key=gate_key),
        Linear(in_features, hidden_features, use_bias, dtype, key=up_key),
        Linear(hidden_features, out_features, use_bias, dtype, key=down_key),
    )


def _check_input(name: str, x: Value, in_features: int) -> None:
    if jnp.shape(x) != (in_features,):
        raise ValueError(
            f"{name}: expected x of shape ({in_features},); got {jnp.shape(x)}. For a batch, use `jax.vmap(block)(x)`."
        )
