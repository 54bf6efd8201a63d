"""A process that begins, with layers of ours or of Equinox's: `python -m benchmarks._startup_process WHO LAYERS`.

What it imports at once is in Python's own library: else it would not count.
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any


OURS, THEIRS = "eqxcallback", "Equinox"


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
