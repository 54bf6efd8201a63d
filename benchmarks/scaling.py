"""Measure how cost grows: attention with its length, one token with the filled length of its cache and with the batch, a norm
with rows and width, and the time to compile with the number of layers. Threads: by the two processes.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import eqxcallback as eqxc

from . import attention, decode, shapes
from ._cases import CASES, case_contestants
from ._contestants import normal
from ._rows import OURS, Row, Setting
from ._timing import Runner, waited_for_on


Points = Callable[[Sequence[int]], Sequence[int]]


def measure(setting: Setting) -> Iterator[Row]:
    # Many points, each of them for a short time.
    short = dataclasses.replace(setting, quick=True, memory=False)
    for part in (_lengths, _filled, _batches, _rows_and_widths, _layers):
        yield from part(short, _points(setting))


def _points(setting: Setting) -> Points:
    if setting.tiny:
        return lambda points: points[:1]
    return lambda points: points[:: 2 if setting.quick else 1]


def _powers(first: int, last: int) -> list[int]:
    return [1 << i for i in range(last.bit_length()) if first <= 1 << i <= last]


def _lengths(setting: Setting, points: Points) -> Iterator[Row]:
    for length in points(_powers(128, 8192)):
        shape = shapes.Attention(1, 2, 2, length, 64, causal=False)
        race = setting.race(attention.contestants(setting, shape, jnp.float32, "forward"))
        curve = ("attention, 2 heads", "length")
        yield Row(f"attention, {shape}", "ms", 1, race, curve=curve, x=length, tolerance=1e-4)


def _filled(setting: Setting, points: Points) -> Iterator[Row]:
    cache = decode.cache_of(shapes.GPT2, 1, 64 if setting.tiny else 8192)
    for length in points(_powers(64, 8192)):
        race = setting.race(decode.attend_contestants(setting, cache, jnp.float32, length))
        curve = (f"one token, {cache}", "filled length")
        yield Row(f"one token, {length} of {cache}", "us", 1, race, curve=curve, x=length, tolerance=1e-4)


def _batches(setting: Setting, points: Points) -> Iterator[Row]:
    for batch in points(_powers(1, 32)):
        keys = 8 if setting.tiny else 512
        cache = decode.cache_of(shapes.SMOLLM2, batch, keys)
        race = setting.race(decode.attend_contestants(setting, cache, jnp.float32, keys))
        curve = (f"one token, SmolLM2-135M, cache of {keys}", "batch")
        yield Row(f"one token, {cache}", "us", 1, race, curve=curve, x=batch, tolerance=1e-4)


def _rows_and_widths(setting: Setting, points: Points) -> Iterator[Row]:
    case = CASES["layer_norm"]
    width, rows = shapes.GPT2.embedding, 256
    of_rows = [((count, width), ("layer_norm of width 768", "rows"), count) for count in points(_powers(1, 4096))]
    of_widths = [((rows, size), ("layer_norm of 256 rows", "width"), size) for size in points(_powers(64, 16_384))]
    for shape, curve, x in of_rows + of_widths:
        race = setting.race(case_contestants(setting, case, "forward", case.args(shape, jnp.float32), waited_for_on))
        yield Row(f"layer_norm {list(shape)}", "us", 1, race, curve=curve, x=x, tolerance=1e-4)


def _layers(setting: Setting, points: Points) -> Iterator[Row]:
    size = 8 if setting.tiny else 64

    def compiled(norm: Any, activation: Callable[[jax.Array], jax.Array], count: int) -> Runner:
        layers = [(norm(size), jnp.eye(size)) for _ in range(count)]
        x = normal(0, 4, size)

        def compile_once() -> Any:
            def program(layers: Any, x: jax.Array) -> jax.Array:  # a new one, which nobody has compiled yet
                for norm, weight in layers:
                    x = x + activation(jax.vmap(norm)(x) @ weight)
                return x

            weights, tree = jax.tree.flatten(layers)
            jitted = jax.jit(lambda weights, x: program(jax.tree.unflatten(tree, weights), x))
            return jitted.lower(weights, x).compile(), weights

        def run(count: int) -> float:
            start = time.perf_counter()
            for _ in range(count):
                compile_once()
            return time.perf_counter() - start

        def result() -> Any:
            executable, weights = compile_once()
            return executable(weights, x)

        return Runner(run, result)

    gate = lambda x: eqxc.ops.swiglu(x, x)
    for count in points(_powers(1, 16)):
        made = {
            OURS: functools.partial(compiled, eqxc.nn.LayerNorm, gate, count),
            "XLA": functools.partial(compiled, eqx.nn.LayerNorm, lambda x: jax.nn.silu(x) * x, count),
        }
        curve = ("to compile a norm, a product and a gate", "layers")
        race = setting.race(made)
        yield Row(f"compile {count} layers", "s", 1, race, curve=curve, x=count, tolerance=1e-3)
