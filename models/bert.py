"""A BERT encoder of sentences, made of eqxcallback's layers: all-MiniLM-L6-v2, and others of its kind.

Shape letters: S tokens, E embedding size, H heads.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

import eqxcallback as eqxc

from ._errors import ModelFileError


# Names of tensors in safetensors files, as PyTorch's models have them.
NAMES = {
    "embeddings.word_embeddings.weight": "tokens.weight",
    "embeddings.position_embeddings.weight": "positions.weight",
    "embeddings.token_type_embeddings.weight": "kinds.weight",
    "embeddings.LayerNorm.*": "norm.*",
    "encoder.layer.*.attention.self.query.*": "blocks.*.projections.0.*",
    "encoder.layer.*.attention.self.key.*": "blocks.*.projections.1.*",
    "encoder.layer.*.attention.self.value.*": "blocks.*.projections.2.*",
    "encoder.layer.*.attention.output.dense.*": "blocks.*.attention_out.*",
    "encoder.layer.*.attention.output.LayerNorm.*": "blocks.*.attention_norm.*",
    "encoder.layer.*.intermediate.dense.*": "blocks.*.up.*",
    "encoder.layer.*.output.dense.*": "blocks.*.down.*",
    "encoder.layer.*.output.LayerNorm.*": "blocks.*.feed_forward_norm.*",
}
# The positions are 0, 1, 2, and so on; the pooler is for another task.
UNUSED = ("embeddings.position_ids", "pooler.dense.*")
# Names of tensors in GGUF files, as llama.cpp has them.
GGUF_NAMES = {
    "token_embd.weight": "tokens.weight",
    "position_embd.weight": "positions.weight",
    "token_types.weight": "kinds.weight",
    "token_embd_norm.*": "norm.*",
    "blk.*.attn_q.*": "blocks.*.projections.0.*",
    "blk.*.attn_k.*": "blocks.*.projections.1.*",
    "blk.*.attn_v.*": "blocks.*.projections.2.*",
    "blk.*.attn_output.*": "blocks.*.attention_out.*",
    "blk.*.attn_output_norm.*": "blocks.*.attention_norm.*",
    "blk.*.ffn_up.*": "blocks.*.up.*",
    "blk.*.ffn_down.*": "blocks.*.down.*",
    "blk.*.layer_output_norm.*": "blocks.*.feed_forward_norm.*",
}


@dataclass(frozen=True)
class Config:
    """The sizes and constants of an encoder."""

    num_layers: int
    embedding_size: int
    hidden_size: int
    """The number of features inside the feed-forward layers."""
    num_heads: int
    vocab_size: int
    num_positions: int
    num_kinds: int
    """The rows in the table of token types, of which a sentence alone has the first."""
    layer_norm_eps: float


class Pooling(NamedTuple):
    """Makes one vector of those of a sentence's tokens; see `pool`.

    **Attributes:**

    - `mode`: one of `POOLING_MODES`.
    - `normalizes`: whether the vector is divided by its norm.
    """

    mode: str
    normalizes: bool


# The mean of all tokens, the first one, which is `[CLS]`, or the last one. The names are sentence-transformers'.
POOLING_MODES = ("mean", "cls", "lasttoken")
# All-MiniLM-L6-v2's.
MEAN = Pooling("mean", normalizes=True)


def config_of(settings: Mapping[str, Any]) -> Config:
    """The config in a model's `config.json`.

    **Raises:**

    - `ModelFileError` if it is of another architecture, or lacks something.
    """
    only = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
    for key, supported in only.items():
        value = settings.get(key, supported if key in ("position_embedding_type", "is_decoder") else None)
        if value != supported:
            raise ModelFileError(f"expected {key} to be {supported!r}; got {value!r}, which is not supported.")

    def size(key: str) -> int:
        value = settings.get(key)
        if type(value) is not int or value < 1:
            raise ModelFileError(f"expected {key} to be a positive integer; got {value!r}. Get the file again.")
        return value

    eps = settings.get("layer_norm_eps")
    if not isinstance(eps, float | int) or not 0 <= eps < math.inf:
        raise ModelFileError(f"expected layer_norm_eps to be 0 or more; got {eps!r}. Get the file again.")
    config = Config(
        num_layers=size("num_hidden_layers"),
        embedding_size=size("hidden_size"),
        hidden_size=size("intermediate_size"),
        num_heads=size("num_attention_heads"),
        vocab_size=size("vocab_size"),
        num_positions=size("max_position_embeddings"),
        num_kinds=size("type_vocab_size"),
        layer_norm_eps=float(eps),
    )
    if config.embedding_size % config.num_heads:
        raise ModelFileError(
            f"expected heads that divide hidden_size, {config.embedding_size}; got {config.num_heads}. Get the file again."
        )
    return config


class Block(eqx.Module):
    """Attention and feed-forward, each with a norm behind it, of the sum with its input."""

    projections: tuple[eqxc.nn.Linear, ...]
    """To queries, keys and values: three layers, or one with the features of all."""
    attention_out: eqxc.nn.Linear
    attention_norm: eqxc.nn.LayerNorm
    up: eqxc.nn.Linear
    down: eqxc.nn.Linear
    feed_forward_norm: eqxc.nn.LayerNorm
    num_heads: int = eqx.field(static=True)

    def __init__(self, config: Config, dtype: Any = None, *, key: PRNGKeyArray):
        size, hidden = config.embedding_size, config.hidden_size
        keys = iter(jax.random.split(key, 6))
        *projections, self.attention_out = (eqxc.nn.Linear(size, size, dtype=dtype, key=next(keys)) for _ in range(4))
        self.projections = tuple(projections)
        self.attention_norm, self.feed_forward_norm = (
            eqxc.nn.LayerNorm(size, config.layer_norm_eps, dtype=dtype) for _ in range(2)
        )
        self.up = eqxc.nn.Linear(size, hidden, dtype=dtype, key=next(keys))
        self.down = eqxc.nn.Linear(hidden, size, dtype=dtype, key=next(keys))
        self.num_heads = config.num_heads

    def __call__(self, x: Float[Array, "S E"], length: Int[Array, ""]) -> Float[Array, "S E"]:
        narrow = x.astype(self.up.weight.dtype)
        parts = [jax.vmap(layer)(narrow) for layer in self.projections]
        parts = jnp.split(parts[0], 3, axis=1) if len(parts) == 1 else parts
        q, k, v = (part.reshape(len(x), self.num_heads, -1) for part in parts)
        attended = eqxc.ops.attention(q, k, v, lengths=length).reshape(x.shape)
        x = jax.vmap(self.attention_norm)(x + jax.vmap(self.attention_out)(attended).astype(x.dtype))
        hidden = eqxc.ops.gelu(jax.vmap(self.up)(x.astype(narrow.dtype)), approximate=False)
        return jax.vmap(self.feed_forward_norm)(x + jax.vmap(self.down)(hidden).astype(x.dtype))


class Bert(eqx.Module):
    """Tokens in, one vector out. A batch goes through `jax.vmap`."""

    tokens: eqxc.nn.Embedding
    positions: eqxc.nn.Embedding
    kinds: eqxc.nn.Embedding
    norm: eqxc.nn.LayerNorm
    blocks: list[Block]
    pooling: Pooling = eqx.field(static=True)

    def __init__(self, config: Config, dtype: Any = None, *, pooling: Pooling = MEAN, key: PRNGKeyArray):
        """**Arguments:**

        - `config`: the sizes.
        - `dtype`: of the parameters and the activations; by default JAX's default float.
        - `pooling`: makes one vector of all tokens'; by default their mean, divided by its norm.
        - `key`: initialises the parameters.
        """
        size = config.embedding_size
        keys = jax.random.split(key, 3 + config.num_layers)
        self.tokens = eqxc.nn.Embedding(config.vocab_size, size, dtype=dtype, key=keys[0])
        self.positions = eqxc.nn.Embedding(config.num_positions, size, dtype=dtype, key=keys[1])
        self.kinds = eqxc.nn.Embedding(config.num_kinds, size, dtype=dtype, key=keys[2])
        self.norm = eqxc.nn.LayerNorm(size, config.layer_norm_eps, dtype=dtype)
        self.blocks = [Block(config, dtype, key=key) for key in keys[3:]]
        self.pooling = pooling

    def __call__(self, tokens: Int[Array, " S"], length: Int[Array, ""]) -> Float[Array, " E"]:
        """**Arguments:**

        - `tokens`: of a sentence, and padding behind them.
        - `length`: how many are of the sentence.

        **Returns:** the vector that `pooling` makes of the sentence's tokens, in f32.
        """
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, length)
        return pool(x, length, self.pooling)

    def embed(self, tokens: Int[Array, " S"]) -> Float[Array, "S E"]:
        """The sum of the embeddings, normalised: the first block takes it."""
        x = jax.vmap(self.tokens)(tokens) + self.positions.weight[: len(tokens)] + self.kinds.weight[:1]
        return jax.vmap(self.norm)(x)


def with_products_of(model: Bert, dtype: Any) -> Bert:
    """The model with linear layers in `dtype`. Norms, and the sums between them, stay as they are."""
    is_linear = lambda node: isinstance(node, eqxc.nn.Linear)
    return jax.tree.map(
        lambda node: jax.tree.map(lambda leaf: leaf.astype(dtype), node) if is_linear(node) else node,
        model,
        is_leaf=is_linear,
    )


def with_one_projection(model: Bert) -> Bert:
    """The model with one product for queries, keys and values, which reads its operand once. It cannot be saved under `NAMES`."""

    def joined(block: Block) -> Block:
        layers: Any = block.projections  # which all have a bias
        weight = jnp.concatenate([layer.weight for layer in layers])
        bias = jnp.concatenate([layer.bias for layer in layers])
        new = eqx.filter_eval_shape(eqxc.nn.Linear, weight.shape[1], weight.shape[0], key=jax.random.key(0))
        layer = eqx.tree_at(lambda layer: (layer.weight, layer.bias), new, (weight, bias))
        return eqx.tree_at(lambda block: block.projections, block, (layer,))

    return eqx.tree_at(lambda model: model.blocks, model, [joined(block) for block in model.blocks])


def pool(x: Float[Array, "S E"], length: Int[Array, ""], pooling: Pooling = MEAN) -> Float[Array, " E"]:
    """The vector of a sentence, in f32, of the first `length` rows of `x`; the others are padding."""
    if pooling.mode == "mean":
        is_real = jnp.arange(len(x)) < length
        vector = jnp.sum(jnp.where(is_real[:, None], x.astype(jnp.float32), 0.0), axis=0)
        if not pooling.normalizes:  # else the norm takes the count out
            vector = vector / jnp.maximum(length, 1).astype(jnp.float32)
    else:
        vector = x[0 if pooling.mode == "cls" else jnp.maximum(length, 1) - 1].astype(jnp.float32)
    # Without tokens the mean is zero.
    return vector / jnp.maximum(jnp.linalg.norm(vector), 1e-12) if pooling.normalizes else vector
