"""GPT-2, one token after the other: all of the model, with random weights, against the same in plain JAX, in f32 and in bf16."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eqxcallback import ops

from . import shapes
from ._contestants import normal
from ._rows import BEST, OURS, Goal, Row, Setting
from ._timing import Runner, waited_for
from .decode import heads_first, keys_inside
from .linear import Apply, f32, ours, quantized, weights


class Layer(NamedTuple):
    """The parameters of a layer. A norm's weight and bias are one array."""

    norms: jax.Array
    qkv: Any
    attention_out: Any
    up: Any
    down: Any


class Params(NamedTuple):
    embedding: jax.Array
    positions: jax.Array
    layers: list[Layer]
    norm: jax.Array
    output: Any


class Parts(NamedTuple):
    """The parts of a model. `new_cache` gives the shape of a cache for a length, a number of heads and their size."""

    linear: Apply
    norm: Callable[[jax.Array, jax.Array], jax.Array]
    append: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    attend: Callable[..., jax.Array]
    new_cache: Callable[[int, int, int], tuple[int, ...]]


def _plain_norm(x: jax.Array, parameters: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-5)
    return centred * scale * parameters[:1] + parameters[1:]


def our_parts(linear: Apply) -> Parts:
    return Parts(
        linear,
        lambda x, parameters: ops.layer_norm(x, *parameters),
        ops.cache_append,
        lambda q, k, v, length: ops.decode_attention(q, k[None], v[None], length[None]),
        # As a program gets it: XLA copies one that it is to reshape before it is written to.
        lambda length, heads, size: (length, heads, size),
    )


_XLA = {
    "keys inside": Parts(
        f32,
        _plain_norm,
        lambda cache, row, position: jax.lax.dynamic_update_slice_in_dim(cache, row[None], position, 1),
        keys_inside,
        lambda length, heads, size: (1, length, heads, size),
    ),
    "heads first": Parts(
        f32,
        _plain_norm,
        lambda cache, row, position: jax.lax.dynamic_update_slice_in_dim(cache, row.swapaxes(0, 1)[None], position, 2),
        heads_first,
        lambda length, heads, size: (1, heads, length, size),
    ),
}


def step(parts: Parts, heads: int, params: Params, caches: Any, token: jax.Array, position: jax.Array) -> Any:
    """The logits after one more token, and the caches with it."""
    x = params.embedding[token] + params.positions[position]
    x, new_caches = x[None], []
    for layer, (keys, values) in zip(params.layers, caches, strict=True):
        q, k, v = parts.linear(parts.norm(x, layer.norms[:2]), layer.qkv).reshape(3, 1, heads, -1)
        keys, values = parts.append(keys, k, position), parts.append(values, v, position)
        new_caches.append((keys, values))
        x = x + parts.linear(parts.attend(q, keys, values, position + 1).reshape(1, -1), layer.attention_out)
        hidden = jax.nn.gelu(parts.linear(parts.norm(x, layer.norms[2:]), layer.up))
        x = x + parts.linear(hidden, layer.down)
    return parts.linear(parts.norm(x, params.norm), params.output), new_caches


def both_params(model: shapes.Model, layers: int, encoding: str) -> tuple[Params, Params]:
    """Return parameters as ours takes them, and in f32. Both stand for the same numbers."""
    if encoding in ("float32", "bfloat16"):
        dtype = jnp.dtype(encoding)
        pair = lambda weight: (weight.astype(dtype), weight.astype(dtype).astype(jnp.float32))
    else:
        dtype, pair = jnp.dtype(jnp.float32), functools.partial(quantized, encoding)
    small, wide = [], []
    for _ in range(layers):
        norms = jnp.concatenate([jnp.ones((1, model.embedding)), jnp.zeros((1, model.embedding))] * 2)
        pairs = [pair(weight) for weight in weights(list(model.matrices.values()))]
        small.append(Layer(norms, *(parts for parts, _ in pairs)))
        wide.append(Layer(norms, *(weight for _, weight in pairs)))
    norm = small[0].norms[:2]
    embedding, positions = normal(1, model.vocabulary, model.embedding), normal(2, model.length, model.embedding)
    output, wide_output = pair(weights([(model.vocabulary, model.embedding)])[0])
    ours_ = Params(embedding.astype(dtype), positions.astype(dtype), small, norm, output)
    return ours_, Params(embedding, positions, wide, norm, wide_output)


def runner(parts: Parts, model: shapes.Model, params: Params, dtype: Any, filled: int, steps: int) -> Runner:
    """The same tokens again in each call, into the same places of the caches."""
    jitted = jax.jit(functools.partial(step, parts, model.heads), donate_argnums=1)
    shape = parts.new_cache(model.length, model.heads, model.head_size)

    def new_caches() -> Any:
        return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in params.layers]

    def generate(caches: Any) -> Any:
        logits = None
        for i in range(steps):
            token, position = jnp.int32(i * 7 % model.vocabulary), jnp.int32(filled + i)
            logits, caches = jitted(params, caches, token, position)
            jax.block_until_ready(logits)
        return logits, caches

    state = [new_caches()]

    def call() -> None:
        _, state[0] = generate(state[0])

    return waited_for(call)._replace(result=lambda: generate(new_caches())[0])


_ENCODINGS = ("float32", "bfloat16", "int8", "Q4_1")


def measure(setting: Setting) -> Iterator[Row]:
    model = shapes.TINY_GPT if setting.tiny else shapes.GPT2
    layers = 3 if setting.quick else model.layers
    filled, steps = (model.length // 2, 4)
    for encoding in _ENCODINGS[:: 2 if setting.quick else 1]:
        small, wide = both_params(model, layers, encoding)
        dtype = jnp.bfloat16 if encoding == "bfloat16" else jnp.float32
        linear = ops.linear if encoding in ("float32", "bfloat16") else ours(encoding)
        made: dict[str, Callable[[], Runner]] = {
            OURS: functools.partial(runner, our_parts(linear), model, small, dtype, filled, steps)
        }
        given: dict[str, tuple[Params, Any]] = {"f32": (wide, jnp.float32)}
        if dtype == jnp.bfloat16:
            given["bf16"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide), dtype
        for name, parts in _XLA.items():
            for kind, (params, of_cache) in given.items():
                made[f"XLA: {kind}, {name}"] = functools.partial(runner, parts, model, params, of_cache, filled, steps)
        yield Row(
            f"{encoding}, {layers} layers, {filled} tokens before",
            "tokens/s",
            steps,
            setting.race(made),
            (Goal(BEST),),
            tolerance=0.1 if dtype == jnp.bfloat16 else 1e-3,
        )
