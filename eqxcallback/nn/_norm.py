"""Normalisation layers."""

import math
from collections.abc import Sequence
from typing import Any, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .. import ops
from ._arrays import are_floats


_no_state: Any = object()


class LayerNorm(eqx.nn.LayerNorm):
    r"""`equinox.nn.LayerNorm`, fused: $\frac{x - \mathbb{E}[x]}{\sqrt{\mathrm{Var}[x] + \varepsilon}} \gamma + \beta$.

    The same constructor, fields and call. A batch goes through `jax.vmap`, which is one call of the kernel for all of it.

    ??? cite

        [Layer Normalization](https://arxiv.org/abs/1607.06450)
    """

    implementation: ops.Implementation = eqx.field(static=True, default="auto")

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        elementwise_affine: bool | None = None,
        implementation: ops.Implementation = "auto",
    ):
        """**Arguments:**

        - `shape`: of the input.
        - `eps`: $\\varepsilon$, added to the variance.
        - `use_weight`, `use_bias`: whether there are $\\gamma$ and $\\beta$.
        - `dtype`: of both; by default JAX's default float.
        - `elementwise_affine`: the deprecated name of `use_weight` and `use_bias`.
        - `implementation`: see [`eqxcallback.Op.using`][].
        """
        super().__init__(shape, eps, use_weight, use_bias, dtype, elementwise_affine=elementwise_affine)
        self.implementation = implementation

    @overload
    def __call__(self, x: Array, *, key: PRNGKeyArray | None = None) -> Array: ...

    @overload
    def __call__(
        self, x: Array, state: eqx.nn.State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, eqx.nn.State]: ...

    @jax.named_scope("eqxcallback.nn.LayerNorm")
    def __call__(
        self, x: Float[Array, "*shape"], state: eqx.nn.State = _no_state, *, key: PRNGKeyArray | None = None
    ) -> Array | tuple[Array, eqx.nn.State]:
        """**Arguments:**

        - `x`: an array of the shape passed to `__init__`.
        - `state`, `key`: ignored, as in `equinox.nn.LayerNorm`.

        **Returns:** an array of the shape and dtype of `x`; if `state` is passed, a pair of it and the state.
        """
        if _fits(self, x):
            flat, weight, bias = _flat(self, x)
            out = ops.layer_norm(flat, weight, bias, eps=self.eps, implementation=self.implementation)
            out = out.reshape(self.shape)
        else:
            out = super().__call__(x, key=key)
        return out if state is _no_state else (out, state)


class RMSNorm(eqx.nn.RMSNorm):
    r"""`equinox.nn.RMSNorm`, fused: $\frac{x}{\sqrt{\varepsilon + \frac{1}{n}\Vert x \Vert^2_2}} \gamma + \beta$.

    The same constructor, fields and call. A batch goes through `jax.vmap`, which is one call of the kernel for all of it.

    ??? cite

        [Root Mean Square Layer Normalization](https://arxiv.org/abs/1910.07467)
    """

    implementation: ops.Implementation = eqx.field(static=True, default="auto")

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        implementation: ops.Implementation = "auto",
    ):
        """**Arguments:**

        - `shape`: of the input.
        - `eps`: $\\varepsilon$, added to the mean of the squares.
        - `use_weight`, `use_bias`: whether there are $\\gamma$ and $\\beta$.
        - `dtype`: of both; by default JAX's default float.
        - `implementation`: see [`eqxcallback.Op.using`][].
        """
        super().__init__(shape, eps, use_weight, use_bias, dtype)
        self.implementation = implementation

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
        if _fits(self, x):
            flat, weight, bias = _flat(self, x)
            out = ops.rms_norm(flat, weight, eps=self.eps, implementation=self.implementation)
            if bias is not None:
                with jax.numpy_dtype_promotion("standard"):
                    wide = jnp.promote_types(x.dtype, jnp.float32)
                out = (out.astype(wide) + bias.astype(wide)).astype(x.dtype)
            out = out.reshape(self.shape)
        else:
            out = super().__call__(x, key=key)
        return out if state is _no_state else (out, state)


def _fits(norm: LayerNorm | RMSNorm, x: Any) -> bool:
    return are_floats(x) and all(each.shape == norm.shape for each in (x, *_parameters(norm)) if each is not None)


def _flat(norm: LayerNorm | RMSNorm, x: Array) -> tuple[Any, ...]:
    size = math.prod(norm.shape)
    return tuple(each if each is None else each.reshape(size) for each in (x, *_parameters(norm)))


def _parameters(norm: LayerNorm | RMSNorm) -> tuple[Any, Any]:
    return norm.weight if norm.use_weight else None, norm.bias if norm.use_bias else None
