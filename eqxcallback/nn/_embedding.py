"""Tables of embeddings."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Integer, PRNGKeyArray, Shaped

from .. import ops
from ..core import AnyArray
from ._arrays import ARRAYS
from ._compiled import compiled


class Embedding(eqx.nn.Embedding):
    """`equinox.nn.Embedding`, which sums the gradient of a table in f16 or bf16 in f32.

    The same constructor, fields and call. A batch goes through `jax.vmap`, which is one gather for all of it.
    """

    implementation: ops.Implementation = eqx.field(static=True, default="auto")

    def __init__(
        self,
        num_embeddings: int | None = None,
        embedding_size: int | None = None,
        weight: Shaped[AnyArray, "num_embeddings embedding_size"] | None = None,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray | None = None,
        implementation: ops.Implementation = "auto",
    ):
        """**Arguments:**

        - `num_embeddings`, `embedding_size`: the shape of the table.
        - `weight`: the table itself, in place of its shape, dtype and key.
        - `dtype`: of the table; by default JAX's default float.
        - `key`: initialises it.
        - `implementation`: see [`eqxcallback.Op.using`][].
        """
        equinox: Any = super()
        equinox.__init__(num_embeddings, embedding_size, weight, dtype, key=key)
        self.implementation = implementation

    def __call__(self, x: Integer[ArrayLike, ""], *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `x`: the index, an integer of shape `()`.
        - `key`: ignored, as in `equinox.nn.Embedding`.

        **Returns:** row `x` of the table, of shape `(embedding_size,)`.
        """
        weight = self.weight
        is_table = isinstance(weight, ARRAYS) and weight.ndim == 2 and weight.shape[0] > 0
        if is_table and eqx.is_array_like(x) and jnp.shape(x) == () and _is_integer(x):
            return _embedding(x, weight, implementation=self.implementation)
        return super().__call__(x, key=key)


def _is_integer(x: object) -> bool:
    return jnp.issubdtype(x.dtype if isinstance(x, ARRAYS) else jnp.result_type(x), jnp.integer)


@compiled
@jax.named_scope("eqxcallback.nn.Embedding")
def _embedding(x: AnyArray, weight: Array, *, implementation: ops.Implementation) -> Array:
    return ops.embedding(x, weight, implementation=implementation)
