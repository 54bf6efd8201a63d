"""Measure eager calls of layers of `eqxcallback.nn`, and of Equinox's."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

import eqxcallback as eqxc

from . import _report
from ._overhead_sizes import microseconds
from ._timing import Timing, interleaved


SIZE = 64


def layers() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Equinox's, and arguments of theirs."""
    key, x = jr.key(0), jnp.ones(SIZE)
    return {
        "Linear": (eqx.nn.Linear(SIZE, SIZE, key=key), (x,)),
        "RMSNorm": (eqx.nn.RMSNorm(SIZE), (x,)),
        "MLP of 3 layers": (eqx.nn.MLP(SIZE, SIZE, SIZE, 2, key=key), (x,)),
        "GRUCell": (eqx.nn.GRUCell(SIZE, SIZE, key=key), (x, x)),
        "LSTMCell": (eqx.nn.LSTMCell(SIZE, SIZE, key=key), (x, (x, x))),
    }


def measure_layers(rounds: int, seconds: float) -> dict[str, dict[str, Timing]]:
    """Seconds for one call, and for the gradient of a sum over the results, of ours and theirs."""

    def gradient(layer: Any, *args: jax.Array) -> Any:
        return eqx.filter_grad(lambda layer: sum(map(jnp.sum, jax.tree.leaves(layer(*args)))))(layer)

    def call(f: Callable[..., Any], *args: Any) -> object:
        return jax.block_until_ready(f(*args))

    rows = {}
    for name, (theirs, args) in layers().items():
        both = {"eqxcallback": eqxc.fuse(theirs)[0], "equinox": theirs}
        for what, of in (("", lambda layer: layer), (", gradient", lambda layer: functools.partial(gradient, layer))):
            contestants = {who: functools.partial(call, of(layer), *args) for who, layer in both.items()}
            rows[name + what] = interleaved(contestants, rounds=rounds, round_seconds=seconds)
    return rows


def report_layers(rows: dict[str, dict[str, Timing]]) -> str:
    body = []
    for name, times in rows.items():
        ours, theirs = times["eqxcallback"], times["equinox"]
        spread = f"{microseconds(ours.low)} to {microseconds(ours.high)}"
        speed = f"{theirs.median / ours.median:.2f}"
        body.append([name, microseconds(ours.median), spread, microseconds(theirs.median), speed])
    return _report.table([f"an eager call, {SIZE} features", "us", "quartiles", "Equinox", "times as fast"], body)
