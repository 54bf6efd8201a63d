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
from ._json import dumps
from ._process import compiling_quickly, run_on
from ._rows import Row, Setting, one_line, tables
from ._stored import kept


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
    """Measure in this process. Results go to files in `folder`, one for each suite."""
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
    """Measure in a process of its own, on these cores alone."""
    command = [sys.executable, "-m", "benchmarks", *suites, "--measure", str(len(cores)), "--out", str(folder)]
    environment = {"JAX_PLATFORMS": "cpu"}
    if mode == "tiny":  # where much of the time is waiting for threads on a machine that others use
        environment |= compiling_quickly() | {"JAX_CPU_ENABLE_ASYNC_DISPATCH": "0"}
    run_on(set(cores), [*command, *([] if mode == "full" else [f"--{mode}"])], environment)


def collect(suite: str, counts: Sequence[int], mode: str, folder: pathlib.Path) -> dict[str, Any]:
    """Collect the results that the processes have left."""
    threads = {str(count): json.loads((folder / f"{suite}.{count}.json").read_text()) for count in counts}
    return {"suite": suite, "title": TITLES[suite], "mode": mode, "machine": _report.machine(), "threads": threads}


def markdown(data: Mapping[str, Any]) -> str:
    sections = []
    for count, part in data["threads"].items():
        heading = f"**{data['title']}, {count} thread{'s' * (count != '1')}**"
        peak = f"The process took {part['peak_rss'] / 1e6:,.0f} MB at most."
        sections.append(f"{heading}\n\n{tables(part['rows'], details=True)}\n\n{peak}")
    return "\n\n".join([*sections, _report.measured_on(data["machine"])])


def markdown_of(results: pathlib.Path) -> str:
    """Return the tables of a file of results."""
    data = json.loads(results.read_text())
    return (
        markdown(data)
        if results.stem in TITLES
        else importlib.import_module(f"benchmarks.{results.stem}").markdown(data)
    )


def write(data: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Write the results as JSON, tables and a plot. The repository keeps the JSON."""
    from ._plot import plot

    threads = {count: {**part, "rows": list(map(kept, part["rows"]))} for count, part in data["threads"].items()}
    stored = json.loads(dumps({**data, "threads": threads}))  # as it is kept, so that both say the same
    _report.write(data["suite"], markdown(stored), stored, folder=folder)
    plot(stored, folder / f"{data['suite']}.svg")
