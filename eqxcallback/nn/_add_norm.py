"""A residual connection and the norm that follows it."""

import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from .. import ops
from ..core import AnyArray, AnyNumber


class FusedAddRMSNorm(eqx.Module):
    r"""$s = x + r$, and $\frac{s}{\sqrt{\varepsilon + \frac{1}{n}\Vert s \Vert^2_2}} \gamma$, in one pass.

    A kernel writes the sum over the residual, if that is donated or needed by nobody else. A batch goes through `jax.vmap`.

    !!! example

        ```python
        x, residual = jax.vmap(norm)(x, residual)  # what the next block takes, and what its result is added to
        ```

    ??? cite

        [Root Mean Square Layer Normalization](https://arxiv.org/abs/1910.07467)
    """

    shape: tuple[int, ...] = eqx.field(static=True)
    eps: AnyNumber = eqx.field(static=True)
    use_weight: bool = eqx.field(static=True)
    weight: Float[Array, "*shape"] | None
    implementation: ops.Implementation = eqx.field(static=True)

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: AnyNumber = 1e-5,
        use_weight: bool = True,
        dtype: DTypeLike | None = None,
        *,
        implementation: ops.Implementation = "auto",
    ):
        """**Arguments:**

        - `shape`: of the inputs.
        - `eps`: $\\varepsilon$, added to the mean of the squares.
        - `use_weight`: whether there is $\\gamma$.
        - `dtype`: of it; by default JAX's default float.
        - `implementation`: see [`eqxcallback.Op.using`][].
        """
        dtype = jnp.result_type(float) if dtype is None else dtype
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps, self.use_weight = eps, use_weight
        self.weight = jnp.ones(self.shape, dtype) if use_weight else None
        self.implementation = implementation

    @jax.named_scope("eqxcallback.nn.FusedAddRMSNorm")
    def __call__(
        self, x: Float[AnyArray, "*shape"], residual: Float[AnyArray, "*shape"], *, key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
        """**Arguments:**

        - `x`, `residual`: of the shape passed to `__init__`, and of one dtype.
        - `key`: ignored.

        **Returns:** the norm of the sum, and the sum, both of that shape and dtype.
        """
        del key
        if jnp.shape(x) != self.shape or jnp.shape(residual) != self.shape:
            raise ValueError(
                f"FusedAddRMSNorm: expected x and residual of the layer's shape, {self.shape}; got {jnp.shape(x)} and "
                f"{jnp.shape(residual)}. For a batch, use `jax.vmap(norm)(x, residual)`."
            )
        size = math.prod(self.shape)
        norm, total = ops.add_rms_norm(
            jnp.reshape(x, size),
            jnp.reshape(residual, size),
            None if self.weight is None else self.weight.reshape(size),
            eps=self.eps,
            implementation=self.implementation,
        )
        return norm.reshape(self.shape), total.reshape(self.shape)
