"""A GPT and a ViT as somebody writes them with Equinox: what `fuse` is given, and a step of their training."""

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

    def __call__(self, x: Float[Array, "length size"], *, causal: bool) -> Float[Array, "length size"]:
        mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool)) if causal else None
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
        self.blocks = [Block(model, key=block_key) for block_key in keys[2:]]
        self.norm = eqx.nn.LayerNorm(model.embedding)

    def __call__(self, tokens: Int[Array, " length"]) -> Float[Array, "length size"]:
        """Rows that are multiplied with the embedding, which gives logits."""
        x = jax.vmap(self.embedding)(tokens) + jax.vmap(self.positions)(jnp.arange(tokens.shape[0]))
        for block in self.blocks:
            x = block(x, causal=True)
        return jax.vmap(self.norm)(x)


class ViT(eqx.Module):
    patches: eqx.nn.Linear
    first: Float[Array, " size"]
    positions: Float[Array, "length size"]
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, model: shapes.Model, *, key: PRNGKeyArray):
        keys, size = jax.random.split(key, model.layers + 3), model.embedding
        self.patches = eqx.nn.Linear(PATCH, size, key=keys[0])
        self.first = jnp.zeros(size)
        self.positions = 0.02 * jax.random.normal(keys[1], (model.length, size))
        self.blocks = [Block(model, key=block_key) for block_key in keys[3:]]
        self.norm = eqx.nn.LayerNorm(size)
        self.head = eqx.nn.Linear(size, model.vocabulary, key=keys[2])

    def __call__(self, patches: Float[Array, "patches numbers"]) -> Float[Array, " classes"]:
        x = jnp.concatenate([self.first[None], jax.vmap(self.patches)(patches)]) + self.positions
        for block in self.blocks:
            x = block(x, causal=False)
        return self.head(self.norm(x[0]))


# Numbers of an image that a vector is made of: 16 x 16 pixels in three colours.
PATCH = 16 * 16 * 3


def new(kind: Callable[..., Any], model: shapes.Model, dtype: Any) -> Any:
    made = kind(model, key=jax.random.key(0))
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, made)


Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def plain_loss(x: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of each token. `x` is what a GPT returns, `weight` the embedding, and `labels` the tokens that come next."""
    logits = jnp.einsum("...f,cf->...c", x, weight, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def gpt_loss(loss: Loss, model: Any, tokens: jax.Array) -> jax.Array:
    """The mean over sequences, of one token more than the model reads."""
    x = jax.vmap(model)(tokens[:, :-1])
    return loss(x, model.embedding.weight, tokens[:, 1:]).astype(jnp.float32).mean()


def vit_loss(loss: Callable[[jax.Array, jax.Array], jax.Array], model: Any, images: tuple[jax.Array, jax.Array]) -> Any:
    """The mean over images, as patches, with their labels."""
    patches, labels = images
    return loss(jax.vmap(model)(patches).astype(jnp.float32), labels).mean()


def step(
    loss: Callable[[Any, Any], jax.Array],
) -> tuple[Callable[[Any], Any], Callable[..., tuple[jax.Array, Any, Any]]]:
    """Two functions: the state of the optimizer for a model's arrays; and one step, of these arrays, the rest of the model, that
    state and a batch, which returns the loss, new arrays and a new state."""
    optimizer = optax.adamw(3e-4)

    def of_arrays(arrays: Any, static: Any, batch: Any) -> jax.Array:
        return loss(eqx.combine(arrays, static), batch)

    def train(arrays: Any, static: Any, state: Any, batch: Any) -> tuple[jax.Array, Any, Any]:
        value, gradients = jax.value_and_grad(of_arrays)(arrays, static, batch)
        updates, state = optimizer.update(gradients, state, arrays)
        return value, eqx.apply_updates(arrays, updates), state

    return optimizer.init, train
