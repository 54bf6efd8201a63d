"""Sentences to vectors: all-MiniLM-L6-v2 from texts on, as `python -m models.embed` does it, and as peers do.

All have the same tokenizer and sort by length. Peers get our batches, or those of sentence-transformers: 32 sentences, padded to
the longest one.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from models import bert
from models.embedder import Batch, Embedder, default_folder, make_batches

from . import _onnx_bert
from ._contestants import to_torch, torch
from ._rows import BEST, OURS, Goal, Row, Setting
from ._timing import Runner, waited_for


_TEXT = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one you "
    "were her all she there would their we him been has when who will more no if out so said what up its about into than them "
    "can only other new some could time these two may then do first any my now such like our over man me even most made after"
)
_SPEED = "sentences/s"

Encode = Callable[[list[np.ndarray]], Any]


def measure(setting: Setting) -> Iterator[Row]:
    counts = {"sentences of about 20 words": (20, 256), "paragraphs of about 120 words": (120, 48)}
    if setting.quick:
        counts = {"sentences of about 20 words": (20, 96)}
    if setting.tiny:
        counts = {"sentences of about 5 words": (5, 4)}
    for dtype in (jnp.float32, jnp.bfloat16):
        embedder = Embedder(default_folder(), dtype=dtype)
        name = jnp.dtype(dtype).name
        for case, (words, count) in counts.items():
            race = setting.race(_contestants(setting, embedder, dtype, _texts(words, count)))
            yield Row(f"{count} {case}, {name}", _SPEED, count, race, (Goal(BEST),), tolerance=_tolerance(dtype))
        if not setting.tiny:
            race = setting.race(_contestants(setting, embedder, dtype, _texts(8, 1)))
            yield Row(f"a query of 8 words, {name}", "ms", 1, race, (Goal(BEST),), tolerance=_tolerance(dtype))


def _tolerance(dtype: Any) -> float:
    return 0.1 if dtype == jnp.bfloat16 else 1e-4


def _texts(words: int, count: int) -> list[str]:
    rng = np.random.default_rng(words)
    lengths = [words] if count == 1 else np.clip(rng.lognormal(np.log(words), 0.5, count), 2, 240).astype(int)
    return [" ".join(rng.choice(_TEXT.split(), length)) for length in lengths]


def _contestants(setting: Setting, embedder: Embedder, dtype: Any, texts: list[str]) -> dict[str, Callable[[], Runner]]:
    def of(make: Callable[[], Encode]) -> Callable[[], Runner]:
        def runner() -> Runner:
            encode = make()
            return waited_for(lambda: encode(embedder.tokenize(texts).sentences))

        return runner

    model, our_batches = embedder.model, functools.partial(make_batches, max_tokens=embedder.max_tokens)
    made = {OURS: of(lambda: embedder.embed), "XLA": of(lambda: _by_batch(_plain(model), our_batches))}
    for name, batches in (("our batches", our_batches), ("batches of 32", _batches_of_32)):
        made[f"torch: {name}"] = of(lambda batches=batches: _by_batch(_torch(model, dtype), batches))
        if dtype == jnp.float32:  # the other has no kernels there
            made[f"onnxruntime: {name}"] = of(
                lambda batches=batches: _by_batch(_onnx_bert.session(model, setting.threads), batches)
            )
    return made


def _by_batch(vectors: Callable[[Batch], np.ndarray], batches: Callable[..., Iterator[Batch]]) -> Encode:
    def encode(sentences: list[np.ndarray]) -> np.ndarray:
        rows = [(batch.which, vectors(batch)[: len(batch.which)]) for batch in batches(sentences)]
        which, parts = zip(*rows, strict=True)
        return np.concatenate(parts)[np.argsort(np.concatenate(which))]

    return encode


def _batches_of_32(sentences: Sequence[np.ndarray]) -> Iterator[Batch]:
    order = np.argsort([-len(tokens) for tokens in sentences], kind="stable")
    for start in range(0, len(order), 32):
        which = order[start : start + 32]
        lengths = np.array([len(sentences[i]) for i in which], np.int32)
        tokens = np.zeros((len(which), lengths.max()), np.int32)
        for row, i in enumerate(which):
            tokens[row, : lengths[row]] = sentences[i]
        yield Batch(which, tokens, lengths)


def _plain(model: bert.Bert) -> Callable[[Batch], np.ndarray]:
    """Plain JAX, with a mask, as one program, as ours."""

    def norm(layer: Any, x: jax.Array) -> jax.Array:
        centred = x - jnp.mean(x, -1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + layer.eps)
        return centred * scale * layer.weight + layer.bias

    def linear(layer: Any, x: jax.Array) -> jax.Array:
        return x.astype(layer.weight.dtype) @ layer.weight.T + layer.bias

    @eqx.filter_jit
    def start(model: bert.Bert, tokens: jax.Array) -> jax.Array:
        x = model.tokens.weight[tokens] + model.positions.weight[: tokens.shape[1]] + model.kinds.weight[0]
        return norm(model.norm, x)

    @eqx.filter_jit
    def apply(block: bert.Block, x: jax.Array, lengths: jax.Array) -> jax.Array:
        parts = jnp.split(linear(block.projections[0], x), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], block.num_heads, -1) for part in parts)
        is_real = jnp.arange(x.shape[1]) < lengths[:, None]
        attended = jax.nn.dot_product_attention(q, k, v, mask=is_real[:, None, None]).reshape(x.shape)
        x = norm(block.attention_norm, x + linear(block.attention_out, attended))
        hidden = jax.nn.gelu(linear(block.up, x), approximate=False)
        return norm(block.feed_forward_norm, x + linear(block.down, hidden))

    pool = eqx.filter_jit(jax.vmap(bert.pool))

    @eqx.filter_jit
    def whole(model: bert.Bert, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        x = start(model, tokens)
        for block in model.blocks:
            x = apply(block, x, lengths)
        return pool(x, lengths)

    return lambda batch: np.asarray(whole(model, jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)))


def _torch(model: bert.Bert, dtype: Any) -> Callable[[Batch], np.ndarray]:
    functional = torch().nn.functional
    kind = torch().bfloat16 if dtype == jnp.bfloat16 else torch().float32
    weights: Any = jax.tree.map(lambda leaf: to_torch(leaf).to(kind) if isinstance(leaf, jax.Array) else leaf, model)

    def norm(layer: Any, x: Any) -> Any:
        return functional.layer_norm(x, x.shape[-1:], layer.weight, layer.bias, layer.eps)

    def linear(layer: Any, x: Any) -> Any:
        return functional.linear(x, layer.weight, layer.bias)

    def apply(block: Any, x: Any, mask: Any) -> Any:
        parts = linear(block.projections[0], x).chunk(3, -1)
        heads = (part.unflatten(-1, (block.num_heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)
        x = norm(block.attention_norm, x + linear(block.attention_out, attended))
        return norm(block.feed_forward_norm, x + linear(block.down, functional.gelu(linear(block.up, x))))

    def vectors(batch: Batch) -> np.ndarray:
        with torch().inference_mode():
            tokens, lengths = torch().from_numpy(batch.tokens), torch().from_numpy(batch.lengths)
            is_real = torch().arange(tokens.shape[1]) < lengths[:, None]
            mask = None if bool(is_real.all()) else is_real[:, None, None]
            x = functional.embedding(tokens, weights.tokens.weight)
            x = norm(weights.norm, x + weights.positions.weight[: tokens.shape[1]] + weights.kinds.weight[0])
            for block in weights.blocks:
                x = apply(block, x, mask)
            total = (x.float() * is_real[..., None]).sum(1)
            return functional.normalize(total, dim=-1).numpy()

    return vectors
