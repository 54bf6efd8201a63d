"""A GPT as somebody writes it with Equinox: what `fuse` is given, and a step of its training."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from . import shapes


class Block(eqx.Module):
    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, model: shapes.Model, *, key: PRNGKeyArray):
        keys, size = jax.random.split(key), model.embedding
        self.attention_norm, self.mlp_norm = eqx.nn.LayerNorm(size), eqx.nn.LayerNorm(size)
        self.attention = eqx.nn.MultiheadAttention(model.heads, size, key=keys[0])
        self.mlp = eqx.nn.MLP(size, size, model.hidden, depth=1, activation=jax.nn.gelu, key=keys[1])

    def __call__(self, x: Float[Array, "length size"]) -> Float[Array, "length size"]:
        mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
        normed = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(normed, normed, normed, mask=mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class GPT(eqx.Module):
    embedding: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, model: shapes.Model, *, key: PRNGKeyArray):
        keys = jax.random.split(key, model.layers + 2)
        self.embedding = eqx.nn.Embedding(model.vocabulary, model.embedding, key=keys[0])
        self.positions = eqx.nn.Embedding(model.length, model.embedding, key=keys[1])
        self.blocks = [Block(model, key=each) for each in keys[2:]]
        self.norm = eqx.nn.LayerNorm(model.embedding)

    def __call__(self, tokens: Int[Array, " length"]) -> Float[Array, "length size"]:
        """Rows that are multiplied with the embedding, which gives logits."""
        x = jax.vmap(self.embedding)(tokens) + jax.vmap(self.positions)(jnp.arange(tokens.shape[0]))
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.norm)(x)


def new(model: shapes.Model, dtype: Any) -> GPT:
    gpt = GPT(model, key=jax.random.key(0))
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, gpt)


Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def plain_loss(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of each token. `x` is what the model returns, `weight` the embedding, and `labels` the tokens that come next."""
    logits = jnp.einsum("...f,cf->...c", x, weight, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def step(loss: Loss) -> tuple[Callable[[Any], Any], Callable[..., tuple[jax.Array, Any, Any]]]:
    """Two functions: the state of the optimizer for a model's arrays; and one step, of these arrays, the rest of the model, that
    state and tokens, which returns the loss, new arrays and a new state."""
    optimizer = optax.adamw(3e-4)

    def mean_loss(arrays: Any, static: Any, tokens: jax.Array) -> jax.Array:
        model = eqx.combine(arrays, static)
        x = jax.vmap(model)(tokens[:, :-1])
        return loss(x, model.embedding.weight, tokens[:, 1:]).astype(jnp.float32).mean()

    def train(arrays: Any, static: Any, state: Any, tokens: jax.Array) -> tuple[jax.Array, Any, Any]:
        value, gradients = jax.value_and_grad(mean_loss)(arrays, static, tokens)
        updates, state = optimizer.update(gradients, state, arrays)
        return value, eqx.apply_updates(arrays, updates), state

    return optimizer.init, train
