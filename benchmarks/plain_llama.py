"""A Llama in plain JAX and float32: what the model in models/ has to compute, and the speed it is compared with.

It shares no code with models/ but the sizes: the weights come from the reader of the `gguf` package, dequantised.
"""

import functools
import math
from typing import NamedTuple

import gguf
import gguf.quants
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from models.gguf import Config


class Layer(NamedTuple):
    attn_norm: Float[Array, " embedding"]
    attn_qkv: Float[Array, "queries+2*keys embedding"]
    """The three matrices in one, which is faster; like `ffn_gate_up`."""
    attn_output: Float[Array, "embedding queries"]
    ffn_norm: Float[Array, " embedding"]
    ffn_gate_up: Float[Array, "2*hidden embedding"]
    ffn_down: Float[Array, "embedding hidden"]


class Params(NamedTuple):
    embedding: Float[Array, "vocab embedding"]
    layers: list[Layer]
    norm: Float[Array, " embedding"]
    output: Float[Array, "vocab embedding"] | None
    """`None` if it is `embedding`."""


class KeysValues(NamedTuple):
    """The keys and values that one layer keeps of the tokens it has seen. Rows that are not written yet are arbitrary."""

    keys: Float[Array, "kv_heads length head"]
    values: Float[Array, "kv_heads length head"]


Cache = list[KeysValues]


def load(path) -> Params:
    """All the weights, in float32."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}

    def weight(*names: str) -> Array:
        return jnp.asarray(np.concatenate([tensors.pop(f"{name}.weight") for name in names]), jnp.float32)

    layers = []
    while f"blk.{len(layers)}.attn_norm.weight" in tensors:
        block = f"blk.{len(layers)}."
        layers.append(
            Layer(
                attn_norm=weight(block + "attn_norm"),
                attn_qkv=weight(block + "attn_q", block + "attn_k", block + "attn_v"),
                attn_output=weight(block + "attn_output"),
                ffn_norm=weight(block + "ffn_norm"),
                ffn_gate_up=weight(block + "ffn_gate", block + "ffn_up"),
                ffn_down=weight(block + "ffn_down"),
            )
        )
    output = weight("output") if "output.weight" in tensors else None
    params = Params(weight("token_embd"), layers, weight("output_norm"), output)
    assert not tensors, f"weights that are left over: {sorted(tensors)}"
    return params


def _linear(weight: Float[Array, "out in"], x: Float[Array, "s in"]) -> Float[Array, "s out"]:
    return jnp.einsum("oi,si->so", weight, x, precision="highest")


def _rms_norm(x: Float[Array, "s size"], weight: Float[Array, " size"], eps: float) -> Float[Array, "s size"]:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight[None]


def _rotate(x: Float[Array, "s heads head"], positions: Int[Array, " s"], theta: float) -> Float[Array, "s heads head"]:
    """Rotates the pairs `(2i, 2i + 1)` by `position * theta**(-2i / head)`: the order of the rows in a GGUF file."""
    size = x.shape[-1]
    frequencies = theta ** (-np.arange(0, size, 2) / size)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None]
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def _attention(
    queries: Float[Array, "s heads head"], keys_values: KeysValues, mask: Bool[Array, "s length"]
) -> Float[Array, "s heads*head"]:
    s, num_heads, size = queries.shape
    keys, values = keys_values
    num_kv_heads, group = keys.shape[0], num_heads // keys.shape[0]
    # The queries that share keys as rows of one matrix: with them as an axis of their own XLA copies the cache.
    rows = queries.reshape(s, num_kv_heads, group, size).swapaxes(0, 1).reshape(num_kv_heads, s * group, size)
    scores = jnp.einsum("krd,kld->krl", rows, keys, precision="highest") / math.sqrt(size)
    weights = jax.nn.softmax(jnp.where(jnp.repeat(mask, group, axis=0)[None], scores, -jnp.inf), axis=-1)
    attended = jnp.einsum("krl,kld->krd", weights, values, precision="highest")
    return attended.reshape(num_kv_heads, s, group, size).swapaxes(0, 1).reshape(s, num_heads * size)


def _forward(
    params: Params, config: Config, tokens: Int[Array, " s"], start: Int[Array, ""], cache: Cache
) -> tuple[Float[Array, "s embedding"], Cache]:
    """Run the model, without its output matrix, on `tokens` at the positions from `start` on, after those in the cache."""
    positions = start + jnp.arange(len(tokens))
    mask = jnp.arange(cache[0].keys.shape[1])[None] <= positions[:, None]
    num_heads, num_kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
    x = params.embedding[tokens]
    new_cache = []
    for layer, (keys, values) in zip(params.layers, cache, strict=True):
        qkv = _linear(layer.attn_qkv, _rms_norm(x, layer.attn_norm, eps)).reshape(len(tokens), -1, config.head_size)
        query, key, value = jnp.split(qkv, [num_heads, num_heads + num_kv_heads], axis=1)
        key = _rotate(key, positions, config.rope_theta).swapaxes(0, 1)
        keys = jax.lax.dynamic_update_slice_in_dim(keys, key, start, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, value.swapaxes(0, 1), start, axis=1)
        new_cache.append(KeysValues(keys, values))
        attended = _attention(_rotate(query, positions, config.rope_theta), new_cache[-1], mask)
        x = x + _linear(layer.attn_output, attended)
        gate, up = jnp.split(_linear(layer.ffn_gate_up, _rms_norm(x, layer.ffn_norm, eps)), 2, axis=-1)
        x = x + _linear(layer.ffn_down, jax.nn.silu(gate) * up)
    return _rms_norm(x, params.norm, eps), new_cache


def _output(params: Params, x: Float[Array, "s embedding"]) -> Float[Array, "s vocab"]:
    return _linear(params.embedding if params.output is None else params.output, x)


def empty_cache(config: Config, length: int) -> Cache:
    shape = (config.num_kv_heads, length, config.head_size)
    return [KeysValues(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers)]


@functools.partial(jax.jit, static_argnums=1)
def logits(params: Params, config: Config, tokens: Int[Array, " s"]) -> Float[Array, "s vocab"]:
    """Return the logits of every position."""
    start = jnp.zeros((), jnp.int32)
    return _output(params, _forward(params, config, tokens, start, empty_cache(config, len(tokens)))[0])


@functools.partial(jax.jit, static_argnums=(1, 3))
def prefill(
    params: Params, config: Config, tokens: Int[Array, " s"], cache_len: int
) -> tuple[Float[Array, " vocab"], Cache]:
    """The logits after the last of the first tokens, and a cache with room for `cache_len` tokens in all."""
    x, cache = _forward(params, config, tokens, jnp.zeros((), jnp.int32), empty_cache(config, cache_len))
    return _output(params, x[-1:])[0], cache


@functools.partial(jax.jit, static_argnums=1, donate_argnums=4)
def decode_step(
    params: Params, config: Config, token: Int[Array, ""], position: Int[Array, ""], cache: Cache
) -> tuple[Float[Array, " vocab"], Cache]:
    """The logits after one more token, the one at `position`, and the cache, which is updated in place."""
    x, cache = _forward(params, config, token[None], position, cache)
    return _output(params, x)[0], cache


def generate(params: Params, config: Config, tokens: Int[Array, " s"], num: int) -> list[int]:
    """The `num` tokens that are the likeliest, one after the other."""
    scores, cache = prefill(params, config, tokens, len(tokens) + num)
    generated = [int(jnp.argmax(scores))]
    while len(generated) < num:
        position = jnp.asarray(len(tokens) + len(generated) - 1, jnp.int32)
        scores, cache = decode_step(params, config, jnp.asarray(generated[-1], jnp.int32), position, cache)
        generated.append(int(jnp.argmax(scores)))
    return generated
