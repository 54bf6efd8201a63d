"""A GPT and a ViT as somebody writes them with `equinox.nn`, and their losses. `eqxcallback.fuse` makes the fast models of them.

In the GPT the table of the embedding is the output weights as well. Both have their norms before attention and MLP.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a transformer."""

    num_layers: int
    embedding_size: int
    hidden_size: int
    """The number of features inside the feed-forward layers."""
    num_heads: int
    length: int
    """The rows that the blocks see: the tokens of a GPT, at most; the patches of a ViT and one more."""


class Block(eqx.Module):
    """Attention and a feed-forward layer."""

    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        keys, size = jax.random.split(key), config.embedding_size
        self.attention_norm, self.mlp_norm = eqx.nn.LayerNorm(size), eqx.nn.LayerNorm(size)
        self.attention = eqx.nn.MultiheadAttention(config.num_heads, size, key=keys[0])
        self.mlp = eqx.nn.MLP(size, size, config.hidden_size, depth=1, activation=jax.nn.gelu, key=keys[1])

    def __call__(self, x: Float[Array, "length size"], *, causal: bool) -> Float[Array, "length size"]:
        mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool)) if causal else None
        normed = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(normed, normed, normed, mask=mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class GPT(eqx.Module):
    """A language model, of the tokens before to the token after."""

    embedding: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, config: Config, vocab_size: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, config.num_layers + 2)
        size = config.embedding_size
        self.embedding = eqx.nn.Embedding(weight=_small(keys[0], vocab_size, size))
        self.positions = eqx.nn.Embedding(weight=_small(keys[1], config.length, size))
        self.blocks = [Block(config, key=block_key) for block_key in keys[2:]]
        self.norm = eqx.nn.LayerNorm(size)

    def __call__(self, tokens: Int[Array, " length"]) -> Float[Array, "length size"]:
        """Rows that are multiplied with the embedding, which gives logits.

        **Raises:** `ValueError` if there are more tokens than `Config.length`.
        """
        if len(tokens) > self.positions.num_embeddings:
            raise ValueError(
                f"GPT: expected at most {self.positions.num_embeddings} tokens, its length; got {len(tokens)}. "
                "Pass the last ones, or make a longer GPT."
            )
        x = jax.vmap(self.embedding)(tokens) + jax.vmap(self.positions)(jnp.arange(tokens.shape[0]))
        for block in self.blocks:
            x = block(x, causal=True)
        return jax.vmap(self.norm)(x)


class ViT(eqx.Module):
    """A classifier of images that are cut into patches."""

    patches: eqx.nn.Linear
    first: Float[Array, " size"]
    positions: Float[Array, "length size"]
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, config: Config, patch_size: int, num_classes: int, *, key: PRNGKeyArray):
        keys, size = jax.random.split(key, config.num_layers + 3), config.embedding_size
        self.patches = eqx.nn.Linear(patch_size, size, key=keys[0])
        self.first = jnp.zeros(size)
        self.positions = _small(keys[1], config.length, size)
        self.blocks = [Block(config, key=block_key) for block_key in keys[3:]]
        self.norm = eqx.nn.LayerNorm(size)
        self.head = eqx.nn.Linear(size, num_classes, key=keys[2])

    def __call__(self, patches: Float[Array, "patches numbers"]) -> Float[Array, " classes"]:
        x = jnp.concatenate([self.first[None], jax.vmap(self.patches)(patches)]) + self.positions
        for block in self.blocks:
            x = block(x, causal=False)
        return self.head(self.norm(x[0]))


def _small(key: PRNGKeyArray, *shape: int) -> Array:
    """GPT-2's start: of a table of unit rows, the logits would be of the order of the embedding's size."""
    return 0.02 * jax.random.normal(key, shape)


def plain_loss(
    x: Float[Array, "*batch size"], weight: Float[Array, "vocab size"], labels: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """The loss of each token in plain JAX, as `eqxcallback.ops.linear_cross_entropy` is without it.

    **Arguments:**

    - `x`: what a GPT returns.
    - `weight`: its embedding.
    - `labels`: the tokens that come next.
    """
    logits = jnp.einsum("...f,cf->...c", x, weight, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def gpt_loss(loss: Callable[[Any, Any, Any], Array], model: GPT, tokens: Int[Array, "batch more"]) -> Float[Array, ""]:
    """The mean over sequences, of one token more than the model reads. `loss` is of what the model returns for them, its
    embedding and labels: the loss of each token, or a mean.
    """
    x = jax.vmap(model)(tokens[:, :-1])
    return loss(x, model.embedding.weight, tokens[:, 1:]).astype(jnp.float32).mean()


def vit_loss(
    loss: Callable[[Any, Any], Array],
    model: ViT,
    images: tuple[Float[Array, "batch patches numbers"], Int[Array, " batch"]],
) -> Float[Array, ""]:
    """The mean over images, as patches, with their labels. `loss` is of logits and labels."""
    patches, labels = images
    patches = patches.astype(model.patches.weight.dtype)
    return jax.vmap(loss)(jax.vmap(model)(patches).astype(jnp.float32), labels).mean()
