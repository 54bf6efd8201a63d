"""The activations of feed-forward blocks, with a gate and without."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._precision import wide


def activated(x: Float[Array, "..."], *, activation: str) -> Array:
    """**Arguments:** `activation`: `"silu"`, `"gelu"` or `"gelu_tanh"`."""
    return _activated(x.astype(wide(x.dtype)), activation).astype(x.dtype)


def _activated(x: Array, activation: str) -> Array:
    return jax.nn.silu(x) if activation == "silu" else jax.nn.gelu(x, approximate=activation == "gelu_tanh")


def gelu(x: Array, *, approximate: bool) -> Array:
    return activated(x, activation="gelu_tanh" if approximate else "gelu")


def glu(gate: Float[Array, "*batch size"], up: Float[Array, "*batch size"] | None = None, *, activation: str) -> Array:
    """Multiply `up` by the activated `gate`. Without `up`, `gate` has both halves on its last axis, the gate first.

    **Arguments:**

    - `activation`: as in `activated`.
    """
    gate, up = _halves(gate, up)
    dtype = wide(gate.dtype)
    return (_activated(gate.astype(dtype), activation) * up.astype(dtype)).astype(gate.dtype)


def swiglu(gate: Array, up: Array | None = None) -> Array:
    return glu(gate, up, activation="silu")


def geglu(gate: Array, up: Array | None = None, *, approximate: bool) -> Array:
    return glu(gate, up, activation="gelu_tanh" if approximate else "gelu")


def _halves(gate: Array, up: Array | None) -> tuple[Array, Array]:
    if up is not None:
        return gate, up
    first, second = jnp.split(gate, 2, axis=-1)
    return first, second
