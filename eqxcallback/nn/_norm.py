"""Normalisation layers."""

import math
from collections.abc import Sequence
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .. import ops


_no_state: Any = object()


class RMSNorm(eqx.Module):
    r"""`equinox.nn.RMSNorm`, fused: $\frac{x}{\sqrt{\varepsilon + \frac{1}{n}\Vert x \Vert^2_2}} \gamma + \beta$.

    The same constructor, fields and call. A batch goes through `jax.vmap`, which is one call of the kernel for all of it.

    ??? cite

        [Root Mean Square Layer Normalization](https://arxiv.org/abs/1910.07467)
    """

    shape: tuple[int, ...] = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    use_weight: bool = eqx.field(static=True)
    use_bias: bool = eqx.field(static=True)
    weight: Float[Array, "*shape"] | None
    bias: Float[Array, "*shape"] | None

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
    ):
        """**Arguments:**

        - `shape`: of the input.
        - `eps`: $\\varepsilon$, added to the mean of the squares.
        - `use_weight`, `use_bias`: whether there are $\\gamma$ and $\\beta$.
        - `dtype`: of both; by default JAX's default float.
        """
        dtype = jnp.result_type(float) if dtype is None else dtype
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps = eps
        self.use_weight = use_weight
        self.use_bias = use_bias
        self.weight = jnp.ones(self.shape, dtype) if use_weight else None
        self.bias = jnp.zeros(self.shape, dtype) if use_bias else None

    @overload
    def __call__(self, x: Array, *, key: PRNGKeyArray | None = None) -> Array: ...

    @overload
    def __call__(
        self, x: Array, state: eqx.nn.State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, eqx.nn.State]: ...

    @jax.named_scope("eqxcallback.nn.RMSNorm")
    def __call__(
        self, x: Float[Array, "*shape"], state: eqx.nn.State = _no_state, *, key: PRNGKeyArray | None = None
    ) -> Array | tuple[Array, eqx.nn.State]:
        """**Arguments:**

        - `x`: an array of the shape passed to `__init__`.
        - `state`, `key`: ignored, as in `equinox.nn.RMSNorm`.

        **Returns:** an array of the shape and dtype of `x`; if `state` is passed, a pair of it and the state.
        """
        del key
        if x.shape != self.shape:
            raise ValueError(
                f"RMSNorm: expected x of the layer's shape, {self.shape}; got {x.shape}. For a batch, use "
                "`jax.vmap(rms_norm)(x)`."
            )
        weight = None if self.weight is None else self.weight.reshape(-1)
        out = ops.rms_norm(x.reshape(math.prod(self.shape)), weight, eps=self.eps).reshape(self.shape)
        if self.bias is not None:
            with jax.numpy_dtype_promotion("standard"):
                wide = jnp.promote_types(x.dtype, jnp.float32)
            out = (out.astype(wide) + self.bias.astype(wide)).astype(x.dtype)
        return out if state is _no_state else (out, state)
