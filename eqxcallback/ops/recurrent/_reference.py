"""The gates of recurrent cells, after their products."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._precision import wide


def lstm_gates(gates: Float[Array, "*batch four_sizes"], cell: Float[Array, "*batch size"]) -> tuple[Array, Array]:
    """`gates`: input, forget, candidate, output. The results are the hidden state and the cell state."""
    dtype = wide(cell.dtype)
    enter, keep, candidate, leave = jnp.split(gates.astype(dtype), 4, axis=-1)
    new = jax.nn.sigmoid(keep) * cell.astype(dtype) + jax.nn.sigmoid(enter) * jnp.tanh(candidate)
    hidden = jax.nn.sigmoid(leave) * jnp.tanh(new)
    return hidden.astype(cell.dtype), new.astype(cell.dtype)


def gru_gates(
    input_gates: Float[Array, "*batch three_sizes"],
    hidden_gates: Float[Array, "*batch three_sizes"],
    hidden: Float[Array, "*batch size"],
    bias_n: Float[Array, " size"] | None = None,
) -> Float[Array, "*batch size"]:
    """Both `gates`: reset, update, candidate. `bias_n` belongs to the candidate of the hidden state."""
    dtype = wide(hidden.dtype)
    i_reset, i_update, i_new = jnp.split(input_gates.astype(dtype), 3, axis=-1)
    h_reset, h_update, h_new = jnp.split(hidden_gates.astype(dtype), 3, axis=-1)
    if bias_n is not None:
        h_new = h_new + jnp.broadcast_to(bias_n.astype(dtype), h_new.shape)
    new = jnp.tanh(i_new + jax.nn.sigmoid(i_reset + h_reset) * h_new)
    update = jax.nn.sigmoid(i_update + h_update)
    return (new + update * (hidden.astype(dtype) - new)).astype(hidden.dtype)
