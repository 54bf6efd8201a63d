"""The loss of each token of a language model whose output weights are quantised, and stay so."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import eqxcallback as eqxc


# Rows of the output layer whose logits, and in a derivative whose weights in f32, are in memory at a time.
_ROWS = 1024


def token_losses(
    x: Float[Array, "S E"], output: eqxc.nn.QuantizedLinear | eqx.nn.Linear, targets: Int[Array, " S"]
) -> Float[Array, " S"]:
    """The cross-entropy of logits and targets. `eqxcallback.ops.linear_cross_entropy` is for weights that are not quantised.

    **Arguments:**

    - `x`: what `output` takes.
    - `output`: the layer of the logits. It has no gradient here.
    - `targets`: the token that follows each. The loss of a negative one is 0.
    """
    output = jax.lax.stop_gradient(output)
    vocab_size = jax.tree.leaves(output)[0].shape[0]
    count = -(-vocab_size // _ROWS)
    rows = -(-vocab_size // count)
    firsts = jnp.arange(count, dtype=jnp.int32) * rows

    def chunked(array: Array) -> Array:
        rest = [(0, count * rows - vocab_size), *[(0, 0)] * (array.ndim - 1)]
        return jnp.pad(array, rest).reshape(count, rows, *array.shape[1:])

    @jax.checkpoint  # else it keeps all logits for the derivative
    def step(sums: Any, chunk: Any) -> tuple[Any, None]:
        highest, total, of_target = sums
        first, layer = chunk
        index = first + jnp.arange(rows, dtype=jnp.int32)[None]
        logits = jax.vmap(layer)(x).astype(jnp.float32)
        logits = jnp.where(index < vocab_size, logits, -jnp.inf)
        new = jnp.maximum(highest, jax.lax.stop_gradient(logits.max(axis=1)))
        total = total * jnp.exp(highest - new) + jnp.exp(logits - new[:, None]).sum(axis=1)
        of_target = of_target + jnp.where(index == targets[:, None], logits, 0.0).sum(axis=1)
        return (new, total, of_target), None

    zeros = jnp.zeros(targets.shape, jnp.float32)
    lowest = jnp.full(targets.shape, jnp.finfo(jnp.float32).min)
    (highest, total, of_target), _ = jax.lax.scan(step, (lowest, zeros, zeros), (firsts, jax.tree.map(chunked, output)))
    return jnp.where(targets < 0, 0.0, highest + jnp.log(total) - of_target)
