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


def profile(
    model: Model, length: int, progress: Callable[[list[Any]], Iterable[Any]] = iter
) -> tuple[list[Part], float]:
    """Time the parts of a step that makes the next token after `length` others. `progress` wraps the iteration over them.

    The layers of a kind are a program, in which one runs after the other. A second program, which takes the same arrays and has
    all but the layers, is subtracted. Several devices, which are of one process, run the layers of a kind side by side.

    Before each run of any program all processors read other memory, so that weights come from memory, as in a step, and not from
    caches. The programs take turns, so that other work on the machine slows all of them, and times are the best of several.

    **Returns:** the parts, of which the last two are what a whole step takes beyond the others, and that step; and how many bytes
    all processors together read in a second. The time beyond the others is negative if they are faster in a step than alone.
    """
    kinds, runs = list(_kinds(model, length)), []
    for kind in progress(kinds):
        runs += [_run(model, kind), _run(model, _without_layers(kind))]
    *times, whole, reading = _best_times([*runs, _whole_step(model, length)])
    parts = [
        Part(name, len(layers), full - empty, _bytes(layers))
        for (name, layers, *_), full, empty in zip(kinds, times[::2], times[1::2], strict=True)
    ]
    rest, size = whole - sum(part.seconds for part in parts), sum(part.bytes for part in parts)
    return [*parts, Part("all else", 1, rest, 0), Part("a whole step", 1, whole, size)], _PROBE_BYTES / reading


def table(parts: list[Part], speed: float) -> str:
    """Write a table for people of what `profile` returns. A part too short to be timed has no speed."""
    lines = [f"{'':22} {'calls':>5} {'ms':>7} {'MB':>7} {'GB/s':>6} {'of reading memory':>18}"]
    for part in parts:
        rate = part.bytes / part.seconds if part.seconds > 0 else None
        speeds = f"{'-':>6} {'-':>18}" if rate is None else f"{rate / 1e9:6.1f} {rate / speed:18.0%}"
        lines.append(f"{part.name:22} {part.calls:5} {part.seconds * 1e3:7.2f} {part.bytes / 1e6:7.1f} {speeds}")
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

    def attention(cache: Any, x: jax.Array) -> jax.Array:
        if isinstance(model, SequenceLlama):  # the first device has as many tokens
            filled = Stripe(cache.k, cache.v, jnp.asarray(-(-length // model.mesh.size), jnp.int32))
            return filled.attend(x.reshape(1, heads, size)).reshape(-1)
        return with_length(cache, jnp.asarray(length, jnp.int32)).attend(x.reshape(heads, size)).reshape(-1)

    def projection(layer: Projection, x: jax.Array) -> jax.Array:
        return dataclasses.replace(layer, sum_over=None)(x[None])[0]  # sums are a kind of their own

    def gated(layer: Projection, x: jax.Array) -> jax.Array:
        return layer.then_swiglu(x[None])[0]

    def add(_: Any, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, AXIS)

    def logits(model: Llama, x: jax.Array) -> jax.Array:
        return model.logits(x[None])[0]

    norms = [norm for block in blocks for norm in (block.attention_norm, block.feed_forward_norm)]
    yield "norms", norms, norm, config.embedding_size
    yield "queries, keys, values", [block.qkv for block in blocks], projection, config.embedding_size
    yield "attention", caches, attention, heads * size
    yield "output of attention", [block.attention_out for block in blocks], projection, heads * size
    yield "gate and up", [block.gate_up for block in blocks], gated, config.embedding_size
    yield "down", [block.down for block in blocks], projection, config.hidden_size
    if isinstance(model, SplitLlama):
        yield "sums over devices", [()] * (2 * len(blocks)), add, config.embedding_size
    yield "logits", [dataclasses.replace(part, blocks=[])], logits, config.embedding_size


def _without_layers(kind: Kind) -> Kind:
    def nothing(_: Any, x: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(x)  # XLA would compute all sums of `x` with itself at once

    name, layers, _, channels = kind
    return name, layers, nothing, channels


def _bytes(layers: list[Any]) -> int:
    return sum(shard.data.nbytes for array in jax.tree.leaves(layers) for shard in array.addressable_shards)


def _run(model: Model, kind: Kind) -> Callable[[], object]:
    """A run of the layers of a kind, compiled."""
    _, layers, call, channels = kind
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

    program, x = jax.jit(run, keep_unused=True), jnp.ones(channels, _of_device(model).dtype)
    jax.block_until_ready(program(arrays, x))
    return lambda: jax.block_until_ready(program(arrays, x))


def _whole_step(model: Model, length: int) -> Callable[[], object]:
    """A run of a step, compiled."""
    weights, tree = jax.tree.flatten(model)

    def step(weights: Any, blocks: Any) -> Any:
        model = jax.tree.unflatten(tree, weights)
        x, cache = model(jnp.zeros(1, jnp.int32), Cache(blocks, jnp.asarray(length, jnp.int32)))
        return model.logits(x), cache.blocks

    program, blocks = jax.jit(step, donate_argnums=1), model.init_cache(length + 1).blocks

    def run() -> None:
        nonlocal blocks
        _, blocks = jax.block_until_ready(program(weights, blocks))

    run()
    return run


def _best_times(runs: list[Callable[[], object]]) -> list[float]:
    """The seconds of each, and last those in which all processors read other memory, as they do before each run."""
    memory, count = np.ones(_PROBE_BYTES // 8, np.uint64), os.cpu_count() or 1
    slices = np.array_split(memory, count)
    with concurrent.futures.ThreadPoolExecutor(count) as pool:

        def read() -> None:
            list(pool.map(np.bitwise_or.reduce, slices))

        times = [(_elapsed(read), _elapsed(run)) for _ in range(_ROUNDS) for run in runs]
    reads, seconds = zip(*times, strict=True)
    return [*(min(seconds[i :: len(runs)]) for i in range(len(runs))), min(reads)]


def _elapsed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
