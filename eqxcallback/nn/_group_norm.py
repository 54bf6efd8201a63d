"""Normalisation of groups of channels."""

import math
from typing import Any, overload

import equinox as eqx
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from .. import ops
from ..core import AnyArray, AnyInt, AnyNumber, Value, epsilon
from ._arrays import are_floats
from ._compiled import compiled


_no_state: Any = object()


class GroupNorm(eqx.nn.GroupNorm):
    r"""`equinox.nn.GroupNorm`, fused: $\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] + \varepsilon}} \gamma + \beta$ over each
    group of channels.

    The same constructor, fields and call. A batch goes through `jax.vmap`, which is one call of the kernel for all of it.

    ??? cite

        [Group Normalization](https://arxiv.org/abs/1803.08494)
    """

    implementation: ops.Implementation = eqx.field(static=True, default="auto")

    def __init__(
        self,
        groups: AnyInt,
        channels: int | None = None,
        eps: AnyNumber = 1e-5,
        channelwise_affine: bool = True,
        dtype: DTypeLike | None = None,
        *,
        implementation: ops.Implementation = "auto",
    ):
        """**Arguments:**

        - `groups`: how many groups the channels are split into.
        - `channels`: of the input; may be left out if `channelwise_affine` is `False`.
        - `eps`: $\\varepsilon$, added to the variance.
        - `channelwise_affine`: whether there are $\\gamma$ and $\\beta$, of shape `(channels,)`.
        - `dtype`: of both; by default JAX's default float.
        - `implementation`: see [`eqxcallback.Op.using`][].
        """
        equinox: Any = super()
        equinox.__init__(groups, channels, eps, channelwise_affine, dtype)
        self.implementation = implementation

    @overload
    def __call__(self, x: AnyArray, *, key: PRNGKeyArray | None = None) -> Array: ...

    @overload
    def __call__(
        self, x: AnyArray, state: eqx.nn.State, *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, eqx.nn.State]: ...

    def __call__(
        self, x: AnyArray, state: eqx.nn.State = _no_state, *, key: PRNGKeyArray | None = None
    ) -> Array | tuple[Array, eqx.nn.State]:
        """**Arguments:**

        - `x`: an array of shape `(channels, ...)`.
        - `state`, `key`: ignored, as in `equinox.nn.GroupNorm`.

        **Returns:** an array of the shape and dtype of `x`; if `state` is passed, a pair of it and the state.
        """
        weight, bias = (self.weight, self.bias) if self.channelwise_affine else (None, None)
        if _fits(x, self.groups, weight, bias):
            options: dict[str, Any] = {"eps": epsilon("GroupNorm", self.eps), "implementation": self.implementation}
            out = _group_norm(x, weight, bias, groups=self.groups, **options)
        else:
            equinox: Any = super()
            out = equinox.__call__(x, key=key)
        return out if state is _no_state else (out, state)


def _fits(x: Value, groups: int, *parameters: Value) -> bool:
    if not are_floats(x) or x.ndim == 0 or x.shape[0] % groups != 0:
        return False
    return all(parameter is None or parameter.shape == x.shape[:1] for parameter in parameters)


@compiled
@jax.named_scope("eqxcallback.nn.GroupNorm")
def _group_norm(
    x: Array, weight: Array | None, bias: Array | None, *, groups: int, eps: float, implementation: ops.Implementation
) -> Array:
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return ops.group_norm(flat, weight, bias, groups=groups, eps=eps, implementation=implementation).reshape(x.shape)
