"""The gated activation of Llama's feed-forward block."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._precision import wide


def swiglu(gate: Float[Array, "*batch size"], up: Float[Array, "*batch size"] | None = None) -> Array:
    """Without `up`, `gate` has both halves on its last axis, the gate first."""
    if up is None:
        gate, up = jnp.split(gate, 2, axis=-1)
    dtype = wide(gate.dtype)
    return (jax.nn.silu(gate.astype(dtype)) * up.astype(dtype)).astype(gate.dtype)
