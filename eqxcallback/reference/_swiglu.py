"""The gated activations of feed-forward blocks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._precision import wide


def swiglu(gate: Float[Array, "*batch size"], up: Float[Array, "*batch size"] | None = None) -> Array:
    """Without `up`, `gate` has both halves on its last axis, the gate first."""
    gate, up = _halves(gate, up)
    dtype = wide(gate.dtype)
    return (jax.nn.silu(gate.astype(dtype)) * up.astype(dtype)).astype(gate.dtype)


def geglu(
    gate: Float[Array, "*batch size"], up: Float[Array, "*batch size"] | None = None, *, approximate: bool
) -> Array:
    gate, up = _halves(gate, up)
    dtype = wide(gate.dtype)
    return (jax.nn.gelu(gate.astype(dtype), approximate=approximate) * up.astype(dtype)).astype(gate.dtype)


def _halves(gate: Array, up: Array | None) -> tuple[Array, Array]:
    if up is not None:
        return gate, up
    first, second = jnp.split(gate, 2, axis=-1)
    return first, second
