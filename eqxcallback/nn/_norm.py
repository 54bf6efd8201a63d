"""Normalisation layers."""

from collections.abc import Sequence
from typing import Any, overload

import equinox as eqx
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Num, PRNGKeyArray

from .. import ops
from ..core import AnyArray, AnyNumber, Value, epsilon
from ._arrays import are_floats
from ._compiled import compiled


_no_state: Any = object()


class LayerNorm(eqx.nn.LayerNorm):
    r"""`equinox.nn.LayerNorm`, fused: $\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \varepsilon}} \gamma + \beta$.

    The same constructor, fields and call. A batch goes through `jax.vmap`, which is one call of the kernel for all of it.

    ??? cite

        [Layer Normalization](https://arxiv.org/abs/1607.06450)
    """

    implementation: ops.Implementation = eqx.field(static=True, default="auto")

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: AnyNumber = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
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
        equinox: Any = super()
        equinox.__init__(shape, eps, use_weight, use_bias, dtype, elementwise_affine=elementwise_affine)
        self.implementation = implementation

    @overload
    def __call__(self, x: AnyArray, *, key: PRNGKeyArray | None = None) -> Array: ...

    @overload
    def __call__(
        self, x: AnyArray, state: eqx.nn.State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, eqx.nn.State]: ...

    def __call__(
        self, x: Num[AnyArray, "*shape"], state: eqx.nn.State = _no_state, *, key: PRNGKeyArray | None = None
    ) -> Array | tuple[Array, eqx.nn.State]:
        """**Arguments:**

        - `x`: an array of the shape passed to `__init__`.
        - `state`, `key`: ignored, as in `equinox.nn.LayerNorm`.

        **Returns:** an array of the shape and dtype of `x`; if `state` is passed, a pair of it and the state.
        """
        weight, bias = _parameters(self)
        if _fits(x, self.shape, weight, bias):
            out = _layer_norm(x, weight, bias, eps=epsilon("LayerNorm", self.eps), implementation=self.implementation)
        else:
            equinox: Any = super()
            out = equinox.__call__(x, key=key)
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
        eps: AnyNumber = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
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
        equinox: Any = super()
        equinox.__init__(shape, eps, use_weight, use_bias, dtype)
        self.implementation = implementation

    @overload
    def __call__(self, x: AnyArray, *, key: PRNGKeyArray | None = None) -> Array: ...

    @overload
    def __call__(
        self, x: AnyArray, state: eqx.nn.State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, eqx.nn.State]: ...

    def __call__(
        self, x: Num[AnyArray, "*shape"], state: eqx.nn.State = _no_state, *, key: PRNGKeyArray | None = None
    ) -> Array | tuple[Array, eqx.nn.State]:
        """**Arguments:**

        - `x`: an array of the shape passed to `__init__`.
        - `state`, `key`: ignored, as in `equinox.nn.RMSNorm`.

        **Returns:** an array of the shape and dtype of `x`; if `state` is passed, a pair of it and the state.
        """
        weight, bias = _parameters(self)
        if _fits(x, self.shape, weight, bias):
            out = _rms_norm(x, weight, bias, eps=epsilon("RMSNorm", self.eps), implementation=self.implementation)
        else:
            equinox: Any = super()
            out = equinox.__call__(x, key=key)
        return out if state is _no_state else (out, state)


def _parameters(norm: LayerNorm | RMSNorm) -> tuple[Array | None, Array | None]:
    return norm.weight if norm.use_weight else None, norm.bias if norm.use_bias else None


def _fits(x: Value, shape: tuple[int, ...], *parameters: Value) -> bool:
    return are_floats(x) and x.shape == shape and all(p is None or p.shape == shape for p in parameters)


@compiled
@jax.named_scope("eqxcallback.nn.LayerNorm")
def _layer_norm(
    x: Array, weight: Array | None, bias: Array | None, *, eps: float, implementation: ops.Implementation
) -> Array:
    return ops.layer_norm(*map(_flat, (x, weight, bias)), eps=eps, implementation=implementation).reshape(x.shape)


@compiled
@jax.named_scope("eqxcallback.nn.RMSNorm")
def _rms_norm(
    x: Array, weight: Array | None, bias: Array | None, *, eps: float, implementation: ops.Implementation
) -> Array:
    return ops.rms_norm(*map(_flat, (x, weight, bias)), eps=eps, implementation=implementation).reshape(x.shape)


def _flat(x: Value) -> Value:
    return None if x is None else x.reshape(x.size)
