"""A Llama-family language model, made of eqxcallback's layers.

Shape letters: S tokens, E embedding size, H query heads, K key/value heads, D head size, V vocabulary size.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import eqxcallback as eqxc

from .gguf import Config, ModelFile, Tensor


class Embedding(eqx.Module):
    """Token embeddings, which are the output weights as well if the file has no others."""

    table: eqxc.nn.QuantizedLinear | eqx.nn.Linear

    def __call__(self, tokens: Int[Array, " S"]) -> Float[Array, "S E"]:
        if isinstance(self.table, eqxc.nn.QuantizedLinear):
            return self.table.rows(tokens)
        return jnp.take(self.table.weight, tokens, axis=0)


class Projection(eqx.Module):
    """Several linear layers of the same input, side by side. Weights of one encoding are one layer, read in one go.

    **Attributes:**

    - `layers`: the layers.
    - `adapter`: what is added to their output, a function of the same input; see `models.lora`.
    - `unmerged`: the projection whose adapter was merged into `layers`.
    """

    layers: list[eqxc.nn.QuantizedLinear | eqx.nn.Linear]
    adapter: Callable[[Array], Array] | None = None
    unmerged: "Projection | None" = None

    def __call__(self, x: Float[Array, "S in_features"]) -> Float[Array, "S out_features"]:
        outs = [jax.vmap(layer)(x) for layer in self.layers]
        out = outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=-1)
        return out if self.adapter is None else out + self.adapter(x)


class Cache(eqx.Module):
    """Keys and values of all blocks. They have one length: a program would copy each of its own."""

    blocks: list[eqxc.nn.KVCache]  # without theirs
    length: Int[Array, ""]


def _with_length(cache: eqxc.nn.KVCache, length: Int[Array, ""] | None) -> eqxc.nn.KVCache:
    return eqx.tree_at(lambda cache: cache.length, cache, length, is_leaf=lambda leaf: leaf is None)


class Block(eqx.Module):
    """Attention and feed-forward, each behind a norm. What is added to its input is left to the next norm, which does it in the
    same pass."""

    attention_norm: eqxc.nn.FusedAddRMSNorm
    qkv: Projection
    attention_out: Projection
    feed_forward_norm: eqxc.nn.FusedAddRMSNorm
    gate_up: Projection
    down: Projection
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)

    def __call__(
        self,
        x: Float[Array, "S E"],
        residual: Float[Array, "S E"],
        table: tuple[Float[Array, "S half"], Float[Array, "S half"]],
        cache: eqxc.nn.KVCache | None = None,
        valid: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "S E"], Float[Array, "S E"], eqxc.nn.KVCache | None]:
        """Without a cache the tokens are all that attention sees."""
        length = x.shape[0]
        x, residual = jax.vmap(self.attention_norm)(x, residual)
        qkv = self.qkv(x)
        qkv = qkv.reshape(length, self.num_heads + 2 * self.num_kv_heads, -1)
        if cache is not None and length == 1:
            q, cache = cache.append_rotary(qkv, *table, valid=valid)
            attended = cache.attend(q)
        else:
            qk, v = jnp.split(qkv, [self.num_heads + self.num_kv_heads], axis=1)
            q, k = jnp.split(eqxc.ops.rotary_embedding(qk, *table), [self.num_heads], axis=1)
            if cache is None:
                attended = eqxc.ops.attention(q, k, v, causal=True)
            else:
                attended, cache = cache.update(q, k, v, valid=valid)
        x = self.attention_out(attended.reshape(length, -1))
        x, residual = jax.vmap(self.feed_forward_norm)(x, residual)
        return self.down(eqxc.ops.swiglu(self.gate_up(x))), residual, cache


@jax.jit
def _run_block(block: Block, *arguments: Any) -> Any:
    """Blocks of the same shapes are traced once."""
    return block(*arguments)


class Llama(eqx.Module):
    """The model. Activations and the cache have one dtype; weights keep the file's encoding."""

    embedding: Embedding
    blocks: list[Block]
    norm: eqxc.nn.RMSNorm
    output: Projection | None  # None: the embedding's
    config: Config = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    def init_cache(self, max_length: int) -> Cache:
        """An empty one for `max_length` tokens."""
        config = self.config
        caches = [
            eqxc.nn.KVCache(max_length, config.num_kv_heads, config.head_size, self.dtype)
            for _ in range(config.num_layers)
        ]
        return Cache([_with_length(cache, None) for cache in caches], jnp.zeros((), jnp.int32))

    def __call__(
        self,
        tokens: Int[Array, " S"],
        cache: Cache,
        valid: Int[Array, ""] | int | None = None,
    ) -> tuple[Float[Array, "S E"], Cache]:
        """**Arguments:**

        - `tokens`: those after the tokens in the cache: a prompt, a part of one, or the one token that was generated last.
        - `cache`: of `init_cache` or of the last call, with room for all of `tokens`. Donate it.
        - `valid`: how many of `tokens` count; the others, at their end, are padding.

        **Returns:** what `logits` takes, for each token, and the cache with the tokens.
        """
        count = jnp.asarray(len(tokens) if valid is None else valid, jnp.int32)
        positions = cache.length + jnp.arange(len(tokens), dtype=jnp.int32)
        table = eqxc.ops.rotary_table(positions, self.config.head_size, theta=self.config.rope_theta)
        x = self.embedding(tokens).astype(self.dtype)
        residual, new_caches = jnp.zeros_like(x), []
        for block, old in zip(self.blocks, cache.blocks, strict=True):
            x, residual, new = _run_block(block, x, residual, table, _with_length(old, cache.length), count)
            new_caches.append(_with_length(new, None))
        return x + residual, Cache(new_caches, cache.length + count)

    def logits(self, x: Float[Array, "S E"]) -> Float[Array, "S V"]:
        x = jax.vmap(self.norm)(x)
        out = jax.vmap(self.embedding.table)(x) if self.output is None else self.output(x)
        return out.astype(jnp.float32)


def load(
    file: ModelFile, *, dtype: Any = jnp.float32, progress: Callable[[Iterable[int]], Iterable[int]] = iter
) -> Llama:
    """The model of a file.

    **Arguments:**

    - `dtype`: of the activations and the cache: f32 or bf16.
    - `progress`: wraps the iteration over the blocks, as `tqdm` does.
    """
    config, tensors = file.config, file.tensors

    def add_norm(name: str) -> eqxc.nn.FusedAddRMSNorm:
        return _with_weight(eqxc.nn.FusedAddRMSNorm(config.embedding_size, config.rms_norm_eps), tensors[name])

    def projection(*names: str, heads: Sequence[int | None] | None = None) -> Projection:
        parts = [tensors[name] for name in names]
        return Projection(_layers(parts, heads or [None] * len(parts)))

    def block(index: int) -> Block:
        prefix = f"blk.{index}."
        file.forget_pages()  # those of the block before, which are copied
        return Block(
            attention_norm=add_norm(prefix + "attn_norm.weight"),
            qkv=projection(
                *(prefix + f"attn_{part}.weight" for part in "qkv"), heads=(config.num_heads, config.num_kv_heads, None)
            ),
            attention_out=projection(prefix + "attn_output.weight"),
            feed_forward_norm=add_norm(prefix + "ffn_norm.weight"),
            gate_up=projection(prefix + "ffn_gate.weight", prefix + "ffn_up.weight"),
            down=projection(prefix + "ffn_down.weight"),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
        )

    (embedding,) = _layers([tensors["token_embd.weight"]], [None])
    return Llama(
        embedding=Embedding(embedding),
        blocks=[block(index) for index in progress(range(config.num_layers))],
        norm=_with_weight(
            eqxc.nn.RMSNorm(config.embedding_size, eps=config.rms_norm_eps, use_bias=False),
            tensors["output_norm.weight"],
        ),
        output=projection("output.weight") if "output.weight" in tensors else None,
        config=config,
        dtype=jnp.dtype(dtype),
    )


def _layers(tensors: Sequence[Tensor], heads: Sequence[int | None]) -> list[eqxc.nn.QuantizedLinear | eqx.nn.Linear]:
    """One layer for each run of tensors of one encoding. `heads`: of a tensor whose rows the file has in pairs."""
    runs: list[tuple[str, list[np.ndarray]]] = []
    for tensor, num_heads in zip(tensors, heads, strict=True):
        encoding = tensor.encoding if tensor.encoding in eqxc.ops.ENCODINGS else "F32"
        rows = _values(tensor)
        rows = rows if num_heads is None else _halves_from_pairs(rows, num_heads)
        if not runs or runs[-1][0] != encoding:
            runs.append((encoding, []))
        runs[-1][1].append(rows)
    return [_layer(encoding, np.concatenate(rows)) for encoding, rows in runs]


def _layer(encoding: Any, rows: np.ndarray) -> eqxc.nn.QuantizedLinear | eqx.nn.Linear:
    # Not `jnp.asarray`, which compiles a copy for each shape. `rows` is a copy of what the file has.
    if encoding != "F32":
        return eqxc.nn.QuantizedLinear(jax.device_put(rows), encoding)
    out_features, in_features = rows.shape
    layer = eqx.filter_eval_shape(eqx.nn.Linear, in_features, out_features, use_bias=False, key=jax.random.key(0))
    return eqx.tree_at(lambda layer: layer.weight, layer, jax.device_put(rows))


def _with_weight(layer: Any, tensor: Tensor) -> Any:
    return eqx.tree_at(lambda layer: layer.weight, layer, jax.device_put(np.array(_values(tensor), np.float32)))


def _values(tensor: Tensor) -> np.ndarray:
    return tensor.data.astype(np.float32) if tensor.encoding == "F16" else tensor.data


def _halves_from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF files have the rows of queries and keys so that neighbours are rotated; our op rotates the halves of a head."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
