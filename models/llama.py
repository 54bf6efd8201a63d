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

from ._errors import ModelFileError
from ._files import Files, Weight
from ._huge_pages import start_moving
from .gguf import Config


# So many tokens over a cache get, bit by bit, what they get one after the other: the kernels of linear layers with quantised
# weights, or in bf16, multiply each of up to three rows as one alone, and attention is that of one token, with a length for each.
FEW_TOKENS = 3


class Embedding(eqx.Module):
    """Token embeddings, which are the output weights as well if the file has no others.

    **Attributes:**

    - `sum_over`: the axis of a mesh over whose devices the rows are split, in a `shard_map`.
    """

    table: eqxc.nn.QuantizedLinear | eqxc.nn.Linear
    sum_over: str | None = eqx.field(static=True, default=None)

    def __call__(self, tokens: Int[Array, " S"]) -> Float[Array, "S E"]:
        if self.sum_over is None:
            return self._take(tokens)
        table = self.table
        count = len(table.blocks if isinstance(table, eqxc.nn.QuantizedLinear) else table.weight)
        rows = tokens - jax.lax.axis_index(self.sum_over) * count
        x = self._take(jnp.clip(rows, 0, count - 1))
        return jax.lax.psum(jnp.where(((rows >= 0) & (rows < count))[:, None], x, 0), self.sum_over)

    def _take(self, rows: Int[Array, " S"]) -> Float[Array, "S E"]:
        if isinstance(self.table, eqxc.nn.QuantizedLinear):
            return self.table.rows(rows)
        return jnp.take(self.table.weight, rows, axis=0)


class Projection(eqx.Module):
    """Several linear layers of the same input, side by side. Weights of one encoding are one layer, read in one go.

    **Attributes:**

    - `layers`: the layers.
    - `sum_over`: the axis of a mesh over whose devices the input is split, in a `shard_map`.
    - `adapter`: what is added to their output, a function of the same input; see `models.lora`.
    - `unmerged`: the projection whose adapter was merged into `layers`.
    """

    layers: list[eqxc.nn.QuantizedLinear | eqxc.nn.Linear]
    sum_over: str | None = eqx.field(static=True, default=None)
    adapter: Callable[[Array], Array] | None = None
    unmerged: "Projection | None" = None

    def __call__(self, x: Float[Array, "S in_features"]) -> Float[Array, "S out_features"]:
        outs = [jax.vmap(layer)(x) for layer in self.layers]
        out = outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=-1)
        out = out if self.adapter is None else out + self.adapter(x)
        return out if self.sum_over is None else jax.lax.psum(out, self.sum_over)

    def then_swiglu(self, x: Float[Array, "S in_features"]) -> Float[Array, "S half_out_features"]:
        """`ops.swiglu` of the projection, whose first half is the gate: a quantised layer computes it before it writes."""
        layer, *others = self.layers
        if others or self.adapter is not None or self.sum_over is not None or isinstance(layer, eqxc.nn.Linear):
            return eqxc.ops.swiglu(self(x))
        return jax.vmap(layer.then_swiglu)(x)


class HeadNorm(eqx.Module):
    """RMS norms of queries and keys, as Qwen3 has them. One call of the kernel is for all of them: the weights of queries and of
    keys differ, and XLA multiplies by them in the pass that puts the values behind them."""

    weight: Float[Array, "heads D"]  # of the H queries and K keys
    eps: float = eqx.field(static=True)

    def __call__(self, qkv: Float[Array, "S all_heads D"]) -> Float[Array, "S all_heads D"]:
        qk, v = jnp.split(qkv, [len(self.weight)], axis=1)
        return jnp.concatenate([eqxc.ops.rms_norm(qk, eps=self.eps) * self.weight[None], v], axis=1)


class Cache(eqx.Module):
    """Keys and values of all blocks. They have one length: a program would copy each of its own."""

    blocks: list[eqxc.nn.KVCache]  # without theirs
    length: Int[Array, ""]


def with_length(cache: eqxc.nn.KVCache, length: Int[Array, ""] | None) -> eqxc.nn.KVCache:
    """The cache of a block, with or without the length that those of all blocks have."""
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
    head_norm: HeadNorm | None = None

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
        if self.head_norm is not None:
            qkv = self.head_norm(qkv)
        if cache is not None and length == 1:
            q, cache = cache.append_rotary(qkv, *table, valid=valid)
            attended = cache.attend(q)
        elif isinstance(cache, eqxc.nn.KVCache) and length <= FEW_TOKENS and cache.window is None:
            lengths = cache.length + jnp.arange(1, length + 1, dtype=jnp.int32)
            q, appended = cache.append_rotary(qkv, *table, valid=valid)
            attended = jax.vmap(lambda q, length: with_length(appended, length).attend(q))(q, lengths)
            cache = appended
        else:
            qk, v = jnp.split(qkv, [self.num_heads + self.num_kv_heads], axis=1)
            q, k = jnp.split(eqxc.ops.rotary_embedding(qk, *table), [self.num_heads], axis=1)
            if cache is None:
                attended = eqxc.ops.attention(q, k, v, causal=True)
            else:
                attended, cache = cache.update(q, k, v, valid=valid)
        x = self.attention_out(attended.reshape(length, -1))
        x, residual = jax.vmap(self.feed_forward_norm)(x, residual)
        return self.down(self.gate_up.then_swiglu(x)), residual, cache


@jax.jit
def _run_block(block: Block, *arguments: Any) -> Any:
    """Blocks of the same shapes are traced once."""
    return block(*arguments)


class Llama(eqx.Module):
    """The model. Activations have one dtype, the cache may have another one, and weights keep the file's encoding."""

    embedding: Embedding
    blocks: list[Block]
    norm: eqxc.nn.RMSNorm
    output: Projection | None  # None: the embedding's
    config: Config = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)
    cache_dtype: Any = eqx.field(static=True, default=None)  # None: that of the activations

    @property
    def logits_sharding(self) -> None:
        """Return that of `logits`, which are on one device."""
        return None

    def init_cache(self, max_length: int) -> Cache:
        """An empty one for `max_length` tokens."""
        config, dtype = self.config, self.dtype if self.cache_dtype is None else self.cache_dtype
        cache = eqx.filter_eval_shape(eqxc.nn.KVCache, max_length, config.num_kv_heads, config.head_size, dtype)
        empty = with_length(cache, None)
        blocks = [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty) for _ in range(config.num_layers)]
        return Cache(blocks, jnp.zeros((), jnp.int32))

    def __call__(
        self,
        tokens: Int[Array, " S"],
        cache: Cache,
        valid: Int[Array, ""] | int | None = None,
        positions: Int[Array, " S"] | None = None,
    ) -> tuple[Float[Array, "S E"], Cache]:
        """**Arguments:**

        - `tokens`: those after the tokens in the cache: a prompt, a part of one, or the one token that was generated last.
        - `cache`: of `init_cache` or of the last call, with room for all of `tokens`. Donate it.
        - `valid`: how many of `tokens` count; the others, at their end, are padding.
        - `positions`: of `tokens`, if they do not just follow those in the cache.

        **Returns:** what `logits` takes, for each token, and the cache with the tokens.
        """
        count = jnp.asarray(len(tokens) if valid is None else valid, jnp.int32)
        if positions is None:
            positions = cache.length + jnp.arange(len(tokens), dtype=jnp.int32)
        table = self.rotary_table(positions)
        x = self.embedding(tokens).astype(self.dtype)
        residual, new_caches = jnp.zeros_like(x), []
        for block, old in zip(self.blocks, cache.blocks, strict=True):
            x, residual, new = _run_block(block, x, residual, table, with_length(old, cache.length), count)
            new_caches.append(with_length(new, None))
        return x + residual, Cache(new_caches, cache.length + count)

    def rotary_table(self, positions: Int[Array, " S"]) -> tuple[Float[Array, "S half"], Float[Array, "S half"]]:
        """The table that blocks take for tokens at these positions."""
        config = self.config
        factors = config.rope_factors or None
        return eqxc.ops.rotary_table(positions, config.head_size, theta=config.rope_theta, factors=factors)

    def logits(self, x: Float[Array, "S E"]) -> Float[Array, "S V"]:
        x = jax.vmap(self.norm)(x)
        out = jax.vmap(self.embedding.table)(x) if self.output is None else self.output(x)
        return out.astype(jnp.float32)


def load(
    file: Files,
    *,
    dtype: Any = jnp.float32,
    cache_dtype: Any = None,
    activations: eqxc.ops.Activations = "exact",
    packed: bool = False,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    place: Callable[[Any], Any] = lambda part: part,
) -> Llama:
    """The model of a file, or of a folder.

    **Arguments:**

    - `file`: of `models.gguf.open_model` or `models.huggingface.open_folder`.
    - `dtype`: of the activations, and of weights that are not quantised: f32 or bf16.
    - `cache_dtype`: of the cache, by default that of the activations; see [`eqxcallback.nn.KVCache`][].
    - `activations`: `"int8"` rounds the inputs of the blocks' quantised layers to 255 levels in each 32; see
        [`eqxcallback.ops.quantized_linear`][]. The output stays exact: for one token reading it takes as long as its products do,
        and rounding it as well would change the most likely token half as often again.
    - `packed`: whether quantised weights, the embedding's too, are put into the form that a CPU multiplies fastest; see
        [`eqxcallback.nn.QuantizedLinear`][]. On other platforms they stay as they are.
    - `progress`: wraps the iteration over the blocks, as `tqdm` does.
    - `place`: takes each part as soon as it is loaded (the embedding, a block, the last norm, the output), and returns what
        takes its place, such as the same on other devices.

    **Raises:** `ModelFileError` if activations should be rounded, and no layer of a block is quantised.
    """
    if activations == "int8":
        _check_is_quantised(file)
    config, tensors, dtype = file.config, file.tensors, jnp.dtype(dtype)
    packed = packed and jax.default_backend() == "cpu"

    # Without numbers, which would be a program to compile.
    norm = eqx.filter_eval_shape(eqxc.nn.RMSNorm, config.embedding_size, eps=config.rms_norm_eps, use_bias=False)
    add_norm = eqx.filter_eval_shape(eqxc.nn.FusedAddRMSNorm, config.embedding_size, config.rms_norm_eps)

    def projection(
        *names: str, heads: Sequence[int | None] | None = None, activations: eqxc.ops.Activations = activations
    ) -> Projection:
        heads = heads if heads is not None and file.rotates_neighbours else [None] * len(names)

        def rows(kind: str) -> list[tuple[str, np.ndarray]]:
            stored = [(tensors[f"{name}.{kind}"], n) for name, n in zip(names, heads, strict=True)]
            return [_rows(tensor, n, dtype) for tensor, n in stored]

        # Either all of them have a bias, or none.
        biases = [bias for _, bias in rows("bias")] if f"{names[0]}.bias" in tensors else []
        return Projection(_layers(rows("weight"), biases, activations, packed))

    def head_norm(prefix: str) -> HeadNorm:
        counts = {"q": config.num_heads, "k": config.num_kv_heads}
        weights = [np.tile(tensors[f"{prefix}attn_{x}_norm.weight"].data, (n, 1)) for x, n in counts.items()]
        return HeadNorm(jax.device_put(np.concatenate(weights).astype(dtype)), config.rms_norm_eps)

    def block(index: int) -> Block:
        prefix = f"blk.{index}."
        file.forget_pages()  # those of the block before, which are copied
        loaded = Block(
            attention_norm=_with_weight(add_norm, tensors[prefix + "attn_norm.weight"]),
            qkv=projection(
                *(f"{prefix}attn_{part}" for part in "qkv"), heads=(config.num_heads, config.num_kv_heads, None)
            ),
            attention_out=projection(prefix + "attn_output"),
            feed_forward_norm=_with_weight(add_norm, tensors[prefix + "ffn_norm.weight"]),
            gate_up=projection(prefix + "ffn_gate", prefix + "ffn_up"),
            down=projection(prefix + "ffn_down"),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_norm=head_norm(prefix) if config.head_norm else None,
        )
        return place(loaded)

    (embedding,) = projection("token_embd", activations="exact").layers
    model = Llama(
        embedding=place(Embedding(embedding)),
        blocks=[block(index) for index in progress(range(config.num_layers))],
        norm=place(_with_weight(norm, tensors["output_norm.weight"])),
        output=place(projection("output", activations="exact")) if "output.weight" in tensors else None,
        config=config,
        dtype=dtype,
        cache_dtype=None if cache_dtype is None else jnp.dtype(cache_dtype),
    )
    start_moving(model)
    return model


def _check_is_quantised(file: Files) -> None:
    encodings = {tensor.encoding for name, tensor in file.tensors.items() if name.startswith("blk.")}
    if not encodings.intersection(eqxc.ops.ENCODINGS):
        raise ModelFileError(
            f"expected blocks with quantised weights, for activations of int8; got {' and '.join(sorted(encodings))}. "
            "Use a GGUF file that has some, or exact activations."
        )


def _rows(tensor: Weight, heads: int | None, dtype: Any) -> tuple[str, np.ndarray]:
    """The encoding and the rows of a tensor. `heads`: of a tensor whose rows the file has in pairs."""
    is_quantised = tensor.encoding in eqxc.ops.ENCODINGS
    rows = tensor.data if is_quantised else tensor.data.astype(dtype, copy=False)
    rows = rows if heads is None else _halves_from_pairs(rows, heads)
    return tensor.encoding if is_quantised else "", rows


def _layers(
    parts: Sequence[tuple[str, np.ndarray]],
    biases: Sequence[np.ndarray],
    activations: eqxc.ops.Activations,
    packed: bool,
) -> list[eqxc.nn.QuantizedLinear | eqxc.nn.Linear]:
    """One layer for each run of weights of one encoding, with their biases, if there are any."""
    runs: list[tuple[str, list[int]]] = []
    for i, (encoding, _) in enumerate(parts):
        if not runs or runs[-1][0] != encoding:
            runs.append((encoding, []))
        runs[-1][1].append(i)
    return [
        _layer(
            encoding,
            _joined([parts[i][1] for i in run]),
            _joined([biases[i] for i in run]) if biases else None,
            activations,
            packed,
        )
        for encoding, run in runs
    ]


def _layer(
    encoding: Any, rows: np.ndarray, bias: np.ndarray | None, activations: eqxc.ops.Activations, packed: bool
) -> eqxc.nn.QuantizedLinear | eqxc.nn.Linear:
    if packed and encoding in eqxc.ops.INTERLEAVED and len(rows) % eqxc.ops.INTERLEAVED_ROWS == 0:
        # As `QuantizedLinear.packed`, in one pass over the file, and without a program for each shape.
        weight = eqxc.ops.interleave_rows(rows, encoding=encoding)
        encoding = eqxc.ops.INTERLEAVED[encoding]
    else:
        weight = _put(rows)
    stored_bias = None if bias is None else _put(bias)
    if encoding:
        return eqxc.nn.QuantizedLinear(weight, encoding, bias=stored_bias, activations=activations)
    out_features, in_features = rows.shape
    new = eqx.filter_eval_shape(
        eqxc.nn.Linear, in_features, out_features, use_bias=bias is not None, key=jax.random.key(0)
    )
    return eqx.tree_at(
        lambda layer: (layer.weight, layer.bias), new, (weight, stored_bias), is_leaf=lambda x: x is None
    )


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _put(x: np.ndarray) -> jax.Array:
    """A copy, if it is a view of the file: JAX would let its array be a view as well. Not by `jnp.asarray`, which compiles one
    for each shape."""
    return jax.device_put(np.require(x, requirements="O"))


def _with_weight(layer: Any, tensor: Weight) -> Any:
    return eqx.tree_at(lambda layer: layer.weight, layer, jax.device_put(tensor.data.astype(np.float32)))


def _halves_from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF files of the architecture `llama` have the rows of queries and keys so that neighbours are rotated; our op rotates the
    halves of a head."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
