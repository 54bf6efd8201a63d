"""Linear layers whose weights stay in blocks of a few bits."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, UInt8

from .. import ops


class QuantizedLinear(eqx.Module):
    """A linear layer without bias over weights in GGUF blocks, which are decoded in the processor's registers and caches, never
    in memory.

    **Attributes:**

    - `blocks`: uint8 of shape `(out_features, bytes)`, see [`eqxcallback.ops.dequantize`][].
    - `encoding`: `"Q4_1"` (5 bits a weight) or `"Q8_0"` (8.5 bits).
    """

    blocks: UInt8[Array, "out_features bytes"]
    encoding: ops.Encoding = eqx.field(static=True)

    def __check_init__(self) -> None:
        if self.encoding not in ops.ENCODINGS:
            raise ValueError(
                f"QuantizedLinear: expected encoding to be one of {', '.join(ops.ENCODINGS)}; got {self.encoding!r}."
            )

    @property
    def in_features(self) -> int:
        return self.blocks.shape[-1] // ops.ENCODINGS[self.encoding] * 32

    @property
    def out_features(self) -> int:
        return self.blocks.shape[-2]

    @jax.named_scope("eqxcallback.nn.QuantizedLinear")
    def __call__(
        self, x: Float[Array, " in_features"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, " out_features"]:
        """**Arguments:**

        - `x`: f32, bf16 or f16, of shape `(in_features,)`. A batch goes through `jax.vmap`, which is one call of the kernel.
        - `key`: ignored, as in `equinox.nn.Linear`.

        **Returns:** an array of shape `(out_features,)` and the dtype of `x`.
        """
        del key
        return ops.quantized_linear(x, self.blocks, encoding=self.encoding)

    def rows(self, index: Array) -> Float[Array, "*index in_features"]:
        """The weights of some output features, in f32: the layer's use as an embedding.

        **Arguments:**

        - `index`: integers of any shape.
        """
        return ops.dequantize(jnp.take(self.blocks, index, axis=0), encoding=self.encoding)
