"""A suite: in a process for each number of threads, on as many cores; and what is made of its rows."""

import importlib
import importlib.util
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from . import _report
from ._process import run_on
from ._rows import OURS, Row, Setting, figure_text, one_line, right_figures, speed, tables


# Those of rows, in order. A suite is a module with `measure(setting)`, which gives its rows.
TITLES = {
    "attention": "Attention",
    "decode": "One token over a cache",
    "norms": "Norms, gates and rotation",
    "cross_entropy": "Cross-entropy",
    "linear": "Linear layers",
    "gpt2": "GPT-2, one token",
    "training": "One step of training",
    "embed": "Sentences to vectors",
    "scaling": "How cost grows",
}
MODES = ("full", "quick", "tiny")


def measure(suites: Sequence[str], threads: int, mode: str, folder: pathlib.Path) -> None:
    """In this process. Results go to files in `folder`, one for each suite."""
    from ._memory import keep_freed_memory, peak
    from ._timing import WaitingClock

    keep_freed_memory()  # else new pages would be measured, which cost more than most kernels
    has_torch = importlib.util.find_spec("torch") is not None
    if has_torch:
        importlib.import_module("torch").set_num_threads(threads)
    is_tiny = mode == "tiny"
    # A peer that is not installed says so in the tables.
    setting = Setting(
        WaitingClock(),
        tiny=is_tiny,
        quick=mode == "quick",
        threads=threads,
        passes=2,
        memory=True,
        best_only=not is_tiny,
    )
    for suite in suites:
        start = time.monotonic()
        measured: Callable[[Setting], Iterator[Row]] = importlib.import_module(f"benchmarks.{suite}").measure
        rows = []
        for row in measured(setting):
            rows.append(row)
            print(
                f"{suite}, {threads}, {time.monotonic() - start:.0f} s: {one_line(row.as_data())}",
                file=sys.stderr,
                flush=True,
            )
        for row in reversed(rows):
            row.race.again()
        data = {
            "rows": [row.as_data() for row in rows],
            "seconds": round(time.monotonic() - start, 1),
            "peak_rss": peak(),
        }
        (folder / f"{suite}.{threads}.json").write_text(json.dumps(data))


def in_own_process(suites: Sequence[str], cores: Sequence[int], mode: str, folder: pathlib.Path) -> None:
    """On these cores alone."""
    command = [sys.executable, "-m", "benchmarks", *suites, "--measure", str(len(cores)), "--out", str(folder)]
    environment = {"JAX_PLATFORMS": "cpu"}
    if (
        mode == "tiny"
    ):  # where compiling takes most of the time, and then waiting for threads on a machine that others use
        environment |= {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0"}
    run_on(set(cores), [*command, *([] if mode == "full" else [f"--{mode}"])], environment)


def collect(suite: str, counts: Sequence[int], mode: str, folder: pathlib.Path) -> dict[str, Any]:
    """What the processes have left."""
    threads = {str(count): json.loads((folder / f"{suite}.{count}.json").read_text()) for count in counts}
    return {"suite": suite, "title": TITLES[suite], "mode": mode, "machine": _report.machine(), "threads": threads}


def markdown(data: Mapping[str, Any]) -> str:
    sections = []
    for count, found in data["threads"].items():
        heading = f"**{data['title']}, {count} thread{'s' * (count != '1')}**"
        peak = f"The process took {found['peak_rss'] / 1e6:,.0f} MB at most."
        sections.append(f"{heading}\n\n{tables(found['rows'], details=True)}\n\n{peak}")
    return "\n\n".join([*sections, _report.measured_on(data["machine"])])


def write(data: Mapping[str, Any], folder: pathlib.Path) -> None:
    """As JSON, tables and a plot."""
    from ._plot import plot

    _report.write(data["suite"], markdown(data), dict(data), folder=folder)
    plot(data, folder / f"{data['suite']}.svg")


_PEERS = ("XLA", "jax.nn", "Equinox", "torch")


def headlines(folder: pathlib.Path) -> str:
    """For the README: of each suite that was measured, the row where ours is the slowest beside its best peer, and the one where
    it is the fastest; and how many times as fast it is as each."""
    lines, machines = [], []
    for suite in TITLES:
        path = folder / f"{suite}.json"
        data = json.loads(path.read_text()) if path.exists() else {"threads": {}}
        rows = [(row, count) for count, found in data["threads"].items() for row in found["rows"] if _is_rated(row)]
        if rows:
            machines.append(data["machine"])
            for name, choose in (("worst", min), ("best", max)):
                row, count = choose(rows, key=lambda rated: _over_best_peer(rated[0]))
                lines.append([f"{TITLES[suite]}, {name}: {row['case']}", count, *_headline(row, (*_PEERS, "probe"))])
    header = ["ours, and over each peer", "threads", "eqxcallback", *(f"/ {peer}" for peer in (*_PEERS, "probe"))]
    return "\n\n".join([_report.table(header, lines), _report.measured_on(*machines)])


def _is_rated(row: Mapping[str, Any]) -> bool:
    """A time or a speed of ours beside some peer's; the points of a curve are in its plot."""
    is_alone = not any(peer in row["best"] for peer in _PEERS)
    return row["curve"] is None and row["unit"] != "MB" and OURS in row["best"] and not is_alone


def _over_best_peer(row: Mapping[str, Any]) -> float:
    figures = right_figures(row)
    ratios = [speed(figures, row["unit"], OURS, peer) for peer in _PEERS]
    return min(ratio for ratio in ratios if ratio is not None)


def _headline(row: Mapping[str, Any], peers: Sequence[str]) -> Iterator[str]:
    figures, unit = right_figures(row), row["unit"]
    yield f"{figure_text(figures[row['best'][OURS]])} {unit}" if OURS in row["best"] else "failed"
    for peer in peers:
        ratio = speed(figures, unit, OURS, peer)
        yield "" if ratio is None else f"{ratio:.2f}"
