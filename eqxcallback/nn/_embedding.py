"""Tables of embeddings."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from .. import ops


class Embedding(eqx.nn.Embedding):
    """`equinox.nn.Embedding`, which sums the gradient of a table in f16 or bf16 in f32.

    The same constructor, fields and call. A batch goes through `jax.vmap`, which is one gather for all of it.
    """

    implementation: ops.Implementation = eqx.field(static=True, default="auto")

    def __init__(
        self,
        num_embeddings: int | None = None,
        embedding_size: int | None = None,
        weight: Float[Array, "num_embeddings embedding_size"] | None = None,
        dtype: Any = None,
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
        super().__init__(num_embeddings, embedding_size, weight, dtype, key=key)
        self.implementation = implementation

    @jax.named_scope("eqxcallback.nn.Embedding")
    def __call__(self, x: Int[ArrayLike, ""], *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `x`: the index, an integer of shape `()`.
        - `key`: ignored, as in `equinox.nn.Embedding`.

        **Returns:** row `x` of the table, of shape `(embedding_size,)`.
        """
        table = isinstance(self.weight, jax.Array | np.ndarray) and self.weight.ndim == 2 and len(self.weight) > 0
        if table and eqx.is_array_like(x) and jnp.shape(x) == () and jnp.issubdtype(jnp.result_type(x), jnp.integer):
            return ops.embedding(x, self.weight, implementation=self.implementation)
        return super().__call__(x, key=key)
