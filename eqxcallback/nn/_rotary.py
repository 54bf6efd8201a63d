"""Rotary position embedding."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Num, PRNGKeyArray

from .. import ops
from ..core import AnyArray
from ._arrays import are_floats


class RotaryPositionalEmbedding(eqx.nn.RotaryPositionalEmbedding):
    """`equinox.nn.RotaryPositionalEmbedding`, fused, and with the right `theta`.

    The same constructor, fields and call. Equinox 0.13.8 keeps its tables by size and dtype alone: the `theta` of the first
    layer that is called holds for all layers of that size. Here each layer has its own.

    Heads go through `jax.vmap`, which is one call of the kernel for all of them.

    ??? cite

        [RoFormer: Enhanced Transformer with Rotary Position Embedding](https://arxiv.org/abs/2104.09864)
    """

    implementation: ops.Implementation = eqx.field(static=True, default="auto", kw_only=True)

    @jax.named_scope("eqxcallback.nn.RotaryPositionalEmbedding")
    def __call__(
        self, x: Num[AnyArray, "seq_length embedding_size"], *, key: PRNGKeyArray | None = None
    ) -> Num[Array, "seq_length embedding_size"]:
        """**Arguments:**

        - `x`: an array of shape `(seq_length, embedding_size)`. Its rows are the positions 0, 1, and so on.
        - `key`: ignored, as in `equinox.nn.RotaryPositionalEmbedding`.

        **Returns:** an array of the shape and dtype of `x`.
        """
        del key
        x = jnp.asarray(x)
        length, size = x.shape
        if size != self.embedding_size:
            raise ValueError(
                f"RotaryPositionalEmbedding: expected x of shape (seq_length, {self.embedding_size}); got {x.shape}. "
                "x.shape[-1] must match self.embedding_size."
            )
        dtype = self._promoted(x)
        with jax.ensure_compile_time_eval():
            x64 = bool(getattr(jax.config, "jax_enable_x64"))  # noqa: B009 - no type checker knows it
            cos, sin = _table(self.precompute_freqs_cis, size, length, self.theta, jnp.dtype(self.dtype), x64)
        if are_floats(x, cos):
            rotated = ops.rotary_embedding(jnp.expand_dims(x, 1), cos, sin, implementation=self.implementation)
            return rotated.reshape(x.shape)
        cos, sin = (jnp.tile(table, (1, 2)).astype(dtype) for table in (cos, sin))
        rotated = x.astype(dtype) * cos + self.rotate_half(x).astype(dtype) * sin
        return rotated.astype(x.dtype)

    def _promoted(self, x: AnyArray) -> Any:
        try:
            return jnp.promote_types(x.dtype, self.dtype)
        except ValueError as error:  # JAX's own class for it, which is not public
            raise type(error)(
                f"RotaryPositionalEmbedding: expected x of the layer's dtype, {jnp.dtype(self.dtype)}; got {x.dtype}. "
                "Promotion of dtypes is strict: make the layer with the dtype of x, or cast x."
            ) from error


RotaryPositionalEmbedding.__init__.__doc__ = """**Arguments:**

- `embedding_size`: of each row, even.
- `theta`: the base of the wave lengths.
- `dtype`: which cosines and sines are rounded to; by default JAX's default float.
- `implementation`: see [`eqxcallback.Op.using`][].
"""


@functools.lru_cache(maxsize=64)
def _table(
    precompute: Callable[..., tuple[Array, Array]], size: int, length: int, theta: float, dtype: DTypeLike, x64: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the tables on the host, so that no device keeps tables which programs have as constants."""
    cos, sin = precompute(size, length, theta, dtype)
    return np.asarray(cos), np.asarray(sin)
