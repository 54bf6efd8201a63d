"""What happens before a program runs: imports, tracing, lowering and compiling, of ours and of Equinox's layers.

Each figure is of processes of its own, which take turns: `python -m benchmarks._startup WHO LAYERS` is one of them.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from . import _report
from ._process import run_on


OURS, THEIRS = "eqxcallback", "Equinox"
STEPS = {
    "import": "import",
    "first result": "first result of a jitted model",
    "again": "the same for another batch",
    "gradient": "first gradient",
}


def measure_startup(rounds: int, layers: int, cores: set[int]) -> dict[str, dict[str, float]]:
    """The median seconds of each step, by whose layers the model has."""
    found: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
    for _ in range(rounds):
        for who, runs in found.items():
            command = [sys.executable, "-m", "benchmarks._startup", who, str(layers)]
            runs.append(json.loads(run_on(cores, command)))
    return {step: {who: statistics.median(run[step] for run in runs) for who, runs in found.items()} for step in STEPS}


def report_startup(steps: Mapping[str, Mapping[str, float]], layers: int) -> str:
    body = []
    for step, seconds in steps.items():
        ours, theirs = seconds[OURS], seconds[THEIRS]
        body.append([STEPS[step], f"{ours:.2f}", f"{theirs:.2f}", f"{ours - theirs:+.2f}", f"{theirs / ours:.2f}"])
    header = [f"a process with {layers} layers", OURS, THEIRS, "more, s", "times as fast"]
    return _report.table(header, body)


def _steps(who: str, layers: int) -> Iterator[tuple[str, float]]:
    """Each with the seconds since the process began or the step before ended."""
    last = time.perf_counter()

    def since() -> float:
        nonlocal last
        before, last = last, time.perf_counter()
        return last - before

    import equinox as eqx
    import jax
    import jax.numpy as jnp

    fused = lambda model: model
    if who == OURS:
        import eqxcallback as eqxc

        fused = lambda model: eqxc.fuse(model)[0]
    yield "import", since()
    norms = [eqx.nn.LayerNorm(64) for _ in range(layers // 2)]
    # One key: random weights would be compiled as well.
    linears = [eqx.nn.Linear(64, 64, key=jax.random.key(0)) for _ in range(layers - layers // 2)]
    model: Any = [layer for pair in zip(norms, linears, strict=False) for layer in pair] + linears[len(norms) :]
    model = fused(model)
    weights, rest = eqx.partition(model, eqx.is_array)
    few, many = jnp.ones((4, 64)), jnp.ones((8, 64))

    def call(weights: Any, x: jax.Array) -> jax.Array:
        for layer in eqx.combine(weights, rest):
            x = jax.vmap(layer)(x)
        return x

    jax.block_until_ready((weights, few, many))
    jitted = jax.jit(call)
    gradient = jax.jit(jax.grad(lambda weights, x: call(weights, x).sum()))
    since()
    jitted(weights, few).block_until_ready()
    yield "first result", since()
    jitted(weights, many).block_until_ready()
    yield "again", since()
    jax.block_until_ready(gradient(weights, few))
    yield "gradient", since()


if __name__ == "__main__":
    print(json.dumps(dict(_steps(sys.argv[1], int(sys.argv[2])))))
