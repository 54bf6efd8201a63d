"""Measure where the time of one token goes: each kind of layer timed alone, against how fast memory can be read."""

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc

from ..decoding.reader import Model
from ..llama import Cache, Llama, Projection, with_length
from ..parallel.sequence_parallel import SequenceLlama, Stripe
from ..parallel.tensor_parallel import AXIS, SplitLlama


_ROUNDS = 10
_PROBE_BYTES = 1 << 28  # more than caches hold


# A name, layers, what one of them does with its input, and the number of channels of that.
Kind = tuple[str, list[Any], Callable[[Any, jax.Array], jax.Array], int]


@dataclasses.dataclass(frozen=True)
class Part:
    """All layers of one kind.

    **Attributes:**

    - `calls`: how many there are.
    - `seconds`: of all of them, for one token.
    - `bytes`: of weights, or of keys and values, that all devices together read.
    """

    name: str
    calls: int
    seconds: float
    bytes: int


def profile(model: Model, length: int, progress: Callable[[list[Any]], Iterable[Any]] = iter) -> list[Part]:
    """The parts of a step that makes the next token after `length` others. `progress` wraps the iteration over them.

    The layers of a kind run one after the other, and nothing between them. Before that other memory is read, so that their
    weights come from memory, as in a step, and not from the processor's caches. Times are the best of several. The last two
    parts are what a whole step takes beyond the others, and that step. Several devices, which are of one process, run the
    layers of a kind side by side.
    """
    kinds = list(_kinds(model, length))
    parts = [_timed(model, kind) for kind in progress(kinds)]
    whole = _whole_step(model, length)
    rest = max(0.0, whole - sum(part.seconds for part in parts))
    size = sum(part.bytes for part in parts)
    return [*parts, Part("all else", 1, rest, 0), Part("a whole step", 1, whole, size)]


def read_speed() -> float:
    """Measure how many bytes all processors together read in a second."""
    memory, count = np.ones(_PROBE_BYTES // 8, np.uint64), os.cpu_count() or 1
    slices = np.array_split(memory, count)
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        runs = [_elapsed(lambda: list(pool.map(np.bitwise_or.reduce, slices))) for _ in range(5)]
    return _PROBE_BYTES / min(runs)


def table(parts: list[Part], speed: float) -> str:
    """Write a table for people. `speed` is that of `read_speed`."""
    lines = [f"{'':22} {'calls':>5} {'ms':>7} {'MB':>7} {'GB/s':>6} {'of reading memory':>18}"]
    for part in parts:
        rate = part.bytes / max(part.seconds, 1e-9)
        lines.append(
            f"{part.name:22} {part.calls:5} {part.seconds * 1e3:7.2f} {part.bytes / 1e6:7.1f} {rate / 1e9:6.1f} "
            f"{rate / speed:18.0%}"
        )
    return "\n".join([*lines, f"{'reading memory':22} {'':5} {'':7} {'':7} {speed / 1e9:6.1f}"])


def _of_device(model: Model) -> Llama:
    """The model that each device runs."""
    if isinstance(model, SplitLlama):
        return model.part
    return model.model if isinstance(model, SequenceLlama) else model


def _kinds(model: Model, length: int) -> Iterator[Kind]:
    part, caches = _of_device(model), model.init_cache(length).blocks
    config, blocks = part.config, part.blocks
    heads, size = config.num_heads, config.head_size

    def norm(layer: Any, x: jax.Array) -> jax.Array:
        return layer(x, x)[0]

    def gate(_: Any, x: jax.Array) -> jax.Array:
        return eqxc.ops.swiglu(x)

    def attention(cache: Any, x: jax.Array) -> jax.Array:
        if isinstance(model, SequenceLlama):  # the first device has as many tokens
            filled = Stripe(cache.k, cache.v, jnp.asarray(-(-length // model.mesh.size), jnp.int32))
            return filled.attend(x.reshape(1, heads, size)).reshape(-1)
        return with_length(cache, jnp.asarray(length, jnp.int32)).attend(x.reshape(heads, size)).reshape(-1)

    def projection(layer: Projection, x: jax.Array) -> jax.Array:
        return dataclasses.replace(layer, sum_over=None)(x[None])[0]  # sums are a kind of their own

    def add(_: Any, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, AXIS)

    def logits(model: Llama, x: jax.Array) -> jax.Array:
        return model.logits(x[None])[0]

    norms = [norm for block in blocks for norm in (block.attention_norm, block.feed_forward_norm)]
    yield "norms", norms, norm, config.embedding_size
    yield "queries, keys, values", [block.qkv for block in blocks], projection, config.embedding_size
    yield "attention", caches, attention, heads * size
    yield "output of attention", [block.attention_out for block in blocks], projection, heads * size
    yield "gate and up", [block.gate_up for block in blocks], projection, config.embedding_size
    yield "gate times up", [()] * len(blocks), gate, 2 * config.hidden_size
    yield "down", [block.down for block in blocks], projection, config.hidden_size
    if isinstance(model, SplitLlama):
        yield "sums over devices", [()] * (2 * len(blocks)), add, config.embedding_size
    yield "logits", [dataclasses.replace(part, blocks=[])], logits, config.embedding_size


def _timed(model: Model, kind: Kind) -> Part:
    name, layers, call, channels = kind
    arrays, tree = jax.tree.flatten(layers)  # flat, and so faster to pass

    def one_after_the_other(layers: list[Any], x: jax.Array) -> jax.Array:
        for layer in layers:
            x = x + call(layer, x)[0] * 0  # which depends on the layer before: they do not run side by side
        return x

    def run(arrays: list[jax.Array], x: jax.Array) -> jax.Array:
        layers = jax.tree.unflatten(tree, arrays)
        if isinstance(model, Llama):
            return one_after_the_other(layers, x)
        return model.on_devices(one_after_the_other, layers, x)

    program, x = jax.jit(run), jnp.ones(channels, _of_device(model).dtype)
    elsewhere, times = np.ones(_PROBE_BYTES // 8, np.uint64), []
    for _ in range(1 + _ROUNDS):
        np.bitwise_or.reduce(elsewhere)
        times.append(_elapsed(lambda: jax.block_until_ready(program(arrays, x))))
    size = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
    return Part(name, len(layers), min(times[1:]), size)


def _whole_step(model: Model, length: int) -> float:
    weights, tree = jax.tree.flatten(model)

    def step(weights: Any, blocks: Any) -> Any:
        model = jax.tree.unflatten(tree, weights)
        x, cache = model(jnp.zeros(1, jnp.int32), Cache(blocks, jnp.asarray(length, jnp.int32)))
        return model.logits(x), cache.blocks

    program, blocks, times = jax.jit(step, donate_argnums=1), model.init_cache(length + 1).blocks, []
    for _ in range(1 + _ROUNDS):
        start = time.perf_counter()
        _, blocks = jax.block_until_ready(program(weights, blocks))
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _elapsed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
