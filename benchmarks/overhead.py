"""Measure the cost of a callback: `python -m benchmarks overhead [--quick] [--readme]`.

Calls: a chain of 100 on f32[128] in one jit, for each way to leave XLA. Sizes: identity and add-one from 4 KiB to 256 MiB,
in place and not; and how the cost grows from 4 to 32 MiB. One loop in C and in Numba. Layers outside of `jit`, beside
Equinox's, and what a process with many of them does before it computes. Seconds are of this machine; the ratios are what
means something.
"""

import argparse
import functools
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback as jax_buffer_callback

import eqxcallback as eqxc

from . import _report
from ._empty import FIRST, empty, empty_but_first, write_first
from ._memory import keep_freed_memory
from ._overhead_kinds import (
    BARE,
    F32,
    KINDS,
    bare_call,
    measure_loops,
    native_kernel,
    op_of,
    ops_of_each_kind,
    report_loops,
)
from ._overhead_layers import measure_layers, report_layers
from ._overhead_sizes import measure_size, microseconds, report_growth, report_sizes
from ._rows import Goal
from ._startup import STEPS, THEIRS, measure_startup, report_startup
from ._timing import Timing, interleaved


CALLS = 100
NATIVE = ("eqxcallback Layer, native add", "eqxcallback Op, native add")


def np_add(ctx, out, x):
    np.add(np.asarray(x), 1, out=np.asarray(out))


# Globals: looking up an attribute of a Module takes as long as the call.
_empty_left, _one_field_left = [None] * FIRST, [None] * FIRST


class Empty(eqxc.Layer):
    """Does nothing, with some arrays of its own."""

    fields: tuple[jax.Array, ...]
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        if _empty_left:
            write_first(_empty_left, out)

    def out_type(self, x):
        return F32


class OneField(eqxc.Layer):
    weight: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        if _one_field_left:
            write_first(_one_field_left, out)

    def out_type(self, x):
        return F32


def native_layer() -> eqxc.Layer:
    class AddOne(eqxc.Layer):
        vmap_method = "fold"
        kernels = {"cpu": native_kernel()}  # noqa: RUF012 - a declaration

        def reference(self, x):
            return x + 1

    return AddOne()


def chain(call: Callable[[jax.Array], jax.Array]) -> Callable[[], object]:
    def program(x):
        for _ in range(CALLS):
            x = call(x)
        return x

    jitted, x = jax.jit(program), jnp.zeros(F32.shape)
    return lambda: jitted(x).block_until_ready()


def measure_calls(rounds: int, seconds: float) -> dict[str, Timing]:
    """Seconds for one call in a chain of 100."""
    x, y, w = np.zeros(128, np.float32), np.zeros(128, np.float32), jnp.zeros(128)
    contestants = {
        "eqxcallback, empty": chain(eqxc.buffer_callback(empty_but_first(), F32)),
        "jax buffer_callback, empty": chain(jax_buffer_callback(empty, F32)),
        "eqxcallback, empty, 2 operands": chain(functools.partial(eqxc.buffer_callback(empty_but_first(), F32), w)),
        "eqxcallback Layer, empty, 1 field": chain(OneField(w)),
        "eqxcallback Layer, empty, 8 fields": chain(Empty((w,) * 8)),
        "eqxcallback Layer, native add": chain(native_layer()),
        "eqxcallback, np.add": chain(eqxc.buffer_callback(np_add, F32)),
        "jax buffer_callback, np.add": chain(jax_buffer_callback(np_add, F32)),
        "jax pure_callback, np.add": chain(lambda x: jax.pure_callback(lambda a: np.add(a, np.float32(1)), F32, x)),
        **{name: chain(op) for name, op in ops_of_each_kind().items()},
        "eqxcallback ops.rms_norm": chain(eqxc.ops.rms_norm),
        BARE: chain(bare_call()),
        "XLA, x + 1": chain(lambda x: jax.lax.optimization_barrier(x + 1)),
        "probe: np.add alone": lambda: [np.add(x, 1, out=y) for _ in range(CALLS)],
    }
    times = interleaved(contestants, rounds=rounds, round_seconds=seconds)
    return {name: Timing(t.median / CALLS, t.low / CALLS, t.high / CALLS) for name, t in times.items()}


def measure_eager(rounds: int, seconds: float) -> dict[str, Timing]:
    """Seconds for one call, and for a program of one call."""
    x = jnp.zeros(F32.shape)
    ours, theirs = eqxc.buffer_callback(empty_but_first(), F32), jax_buffer_callback(empty, F32)
    native, op = bare_call(), op_of(native_kernel())
    layer, empty_layer = native_layer(), OneField(jnp.zeros(128))

    def alone(callback: Callable[..., Callable[..., jax.Array]], **options: bool) -> Callable[[], object]:
        kernel = empty if callback is jax_buffer_callback else empty_but_first()
        jitted = jax.jit(callback(kernel, F32, **options))
        return lambda: jitted(x).block_until_ready()

    return interleaved(
        {
            # An effect costs a program jit's fast dispatch, once, however many calls it has.
            "alone in a jit: eqxcallback, empty": alone(eqxc.buffer_callback),
            "alone in a jit: eqxcallback, empty, effect": alone(eqxc.buffer_callback, has_side_effect=True),
            "alone in a jit: jax buffer_callback, empty": alone(jax_buffer_callback),
            "alone in a jit: jax buffer_callback, empty, effect": alone(jax_buffer_callback, has_side_effect=True),
            "eqxcallback Layer, python lane": lambda: empty_layer(x).block_until_ready(),
            "eqxcallback Layer, native add": lambda: layer(x).block_until_ready(),
            "eqxcallback, empty": lambda: ours(x).block_until_ready(),
            "jax buffer_callback, empty": lambda: theirs(x).block_until_ready(),
            "eqxcallback Op, native add": lambda: op(x).block_until_ready(),
            "ffi_call, native add": lambda: native(x).block_until_ready(),
        },
        rounds=rounds,
        round_seconds=seconds,
    )


def report_calls(calls: dict[str, Timing], eager: dict[str, Timing]) -> str:
    def ratio(times: dict[str, Timing], name: str, peer: str) -> str:
        return f"{times[name].median / times[peer].median:.2f}" if peer in times else ""

    def peer_of(name: str) -> str:
        if name.startswith("alone in a jit"):
            return "alone in a jit: jax buffer_callback, empty" + (", effect" if "effect" in name else "")
        if name.startswith(KINDS) or "native" in name or "ops." in name or "python lane" in name:
            return BARE
        return "jax buffer_callback, " + ("empty" if "empty" in name else "np.add")

    rows = []
    for name, timing in calls.items():
        spread = f"{microseconds(timing.low)} to {microseconds(timing.high)}"
        rows.append([name, microseconds(timing.median), spread, ratio(calls, name, peer_of(name)), peer_of(name)])
    for name, timing in eager.items():
        spread = f"{microseconds(timing.low)} to {microseconds(timing.high)}"
        peer, label = peer_of(name), name if ":" in name else f"eager: {name}"
        rows.append([label, microseconds(timing.median), spread, ratio(eager, name, peer), peer])
    header = ["one call on f32[128]", "median, us", "quartiles", "ratio", "to"]
    return _report.table(header, rows)


def goals(calls: Mapping[str, Timing], startup: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return the goals for `python -m benchmarks --check`."""
    figures = {name: timing.median * 1e6 for name, timing in calls.items()}
    ours = "eqxcallback, empty"
    of = {
        "a native call": [Goal(BARE, round(1 / 1.15, 3), native) for native in NATIVE],
        "a call of any kind": [Goal(BARE, round(1 / 1.2, 3), name) for name in figures if name.startswith(KINDS)],
        "a native call, us": [Goal(0.2, of=native) for native in NATIVE],
        "an empty Python kernel": [Goal("jax buffer_callback, empty", ratio, ours) for ratio in (2.0, 4.0)],
        "np.add": [Goal("jax buffer_callback, np.add", round(1 / 0.65, 3), "eqxcallback, np.add")],
    }
    rows = [
        {"case": case, "goals": [goal.as_data(figures, "us") for goal in case_goals]} for case, case_goals in of.items()
    ]
    # An import may take 0.3 s beyond Equinox's.
    of_steps = {step: Goal(THEIRS) for step in startup} | {"import": Goal(round(startup["import"][THEIRS] + 0.3, 2))}
    return rows + [{"case": STEPS[s], "goals": [goal.as_data(startup[s], "s")]} for s, goal in of_steps.items()]


def in_own_process(mode: str, results: pathlib.Path) -> None:
    """Measure in a process of its own, with a memory allocator of its own."""
    command = [sys.executable, "-m", "benchmarks.overhead", "--mode", mode, "--out", str(results)]
    subprocess.run(command, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--mode", choices=["full", "quick", "tiny"], default="full", help="how many rounds and sizes")
    parser.add_argument("--out", type=pathlib.Path, default=_report.RESULTS, help="a folder for the results")
    options = parser.parse_args()
    rounds, seconds = {"full": (21, 0.05), "quick": (5, 0.05), "tiny": (2, 0.0)}[options.mode]
    calls, eager = measure_calls(rounds, seconds), measure_eager(rounds, seconds)
    layers, loops = measure_layers(rounds, seconds), measure_loops(rounds, seconds)
    starts, number = {"full": (7, 100), "quick": (3, 100), "tiny": (1, 4)}[options.mode]
    startup = measure_startup(starts, number, os.sched_getaffinity(0))
    exponents = {"full": (12, 16, 20, 22, 25, 28), "quick": (12, 18, 22, 25), "tiny": (12, 22, 25)}[options.mode]
    rounds, seconds = {"full": (9, 0.2), "quick": (5, 0.02), "tiny": (2, 0.0)}[options.mode]
    sizes = {1 << e: measure_size(1 << e, rounds, seconds) for e in exponents}
    keep_freed_memory()  # last: it stays so
    kept = {1 << e: measure_size(1 << e, rounds, seconds) for e in exponents if e >= 22}
    data = {
        "mode": options.mode,
        "machine": _report.machine(),
        "rows": goals(calls, startup),
        "calls": {name: t._asdict() for name, t in calls.items()},
        "eager": {name: t._asdict() for name, t in eager.items()},
        "loops": {name: t._asdict() for name, t in loops.items()},
        "eager layers": {name: {who: t._asdict() for who, t in row.items()} for name, row in layers.items()},
        "startup": startup,
        "layers of startup": number,
        "sizes": _as_data(sizes),
        "sizes, malloc keeps memory": _as_data(kept),
    }
    text = markdown(data)
    print(text)
    _report.write("overhead", text, data, folder=options.out)


def markdown(data: Mapping[str, Any]) -> str:
    """Return the tables of results."""

    def timings(row: Mapping[str, Any]) -> dict[str, Timing]:
        return {name: Timing(**timing) for name, timing in row.items()}

    def by_size(part: Mapping[str, Any]) -> dict[int, dict[str, Timing]]:
        return {int(size): timings(row) for size, row in part.items()}

    sizes = by_size(data["sizes"])
    tables = [
        report_calls(timings(data["calls"]), timings(data["eager"])),
        report_loops(timings(data["loops"])),
        report_layers({name: timings(row) for name, row in data["eager layers"].items()}),
        report_startup(data["startup"], data["layers of startup"]),
        report_sizes(sizes),
        report_growth(sizes, by_size(data["sizes, malloc keeps memory"])),
    ]
    return "\n\n".join([*tables, _report.measured_on(data["machine"])])


def _as_data(sizes: Mapping[int, Mapping[str, Timing]]) -> dict[str, Any]:
    return {str(n): {name: t._asdict() for name, t in row.items()} for n, row in sizes.items()}


if __name__ == "__main__":
    main()
