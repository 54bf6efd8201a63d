"""The summary in the README: for each suite how many times as fast as the best peer ours is, as one table and one plot."""

import importlib
import json
import pathlib
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from . import _plot, _report
from ._check import processors, table_of_misses
from ._rows import BEST, OURS, Goal, right_figures
from ._suite import TITLES
from ._timing import family


PLOT = _report.ROOT / "docs" / "assets" / "kernels.svg"
# Calls of ours, each beside the call that a program would make otherwise.
_CALLS = {
    "eqxcallback, empty": "jax buffer_callback, empty",
    "eqxcallback, np.add": "jax buffer_callback, np.add",
    "eqxcallback Op, native add": "ffi_call, native add",
}


class Summary(NamedTuple):
    """The ratios of one suite, by what was measured."""

    title: str
    ratios: dict[str, float]
    machine: Mapping[str, str]


def summaries(folder: pathlib.Path) -> list[Summary]:
    """Summarise all suites that have results with peers in them."""
    collected = [Summary(title, dict(_of_rows(data)), data["machine"]) for title, data in _suites(folder)]
    if (data := _read(folder / "generate.json")) is not None:
        collected.append(Summary("A language model", dict(_of_model(data)), data["machine"]))
    if (data := _read(folder / "overhead.json")) is not None:
        ratios = {ours: data["calls"][peer]["median"] / data["calls"][ours]["median"] for ours, peer in _CALLS.items()}
        collected.append(Summary("A callback in a program", ratios, data["machine"]))
    return [summary for summary in collected if summary.ratios]


def table(folder: pathlib.Path) -> str:
    lines, machines = [], []
    for title, ratios, machine in summaries(folder):
        least = min(ratios, key=ratios.__getitem__)
        values = (ratios[least], statistics.median(ratios.values()), max(ratios.values()))
        lines.append([title, *(f"{value:.2f}" for value in values), f"{least} ({len(ratios)} in all)"])
        machines.append({"cpu": machine["cpu"], "jax": machine["jax"]})
    header = ["times as fast as the best peer", "worst", "median", "best", "the worst case"]
    return "\n\n".join([_report.table(header, lines), _report.measured_on(*machines)])


def publish(folder: pathlib.Path) -> None:
    """Put the table and the plot into the README, the table of processors onto its page, and what others miss onto theirs."""
    _report.put(_report.README, "kernels", table(folder))
    _report.put(_report.PAGE, "processors", of_processors(folder))
    for part in processors(folder)[1:]:
        _report.put(_report.page_of(part), "misses", table_of_misses(part))
    plot(folder, PLOT)


def of_processors(folder: pathlib.Path) -> str:
    """A table of each suite on each processor: how many times as fast as the best peer ours is. A processor but the one that
    `folder` is of has a folder in it."""
    measured = [summaries(part) for part in processors(folder)]
    rows: dict[str, list[str]] = {summary.title: [] for of_one in measured for summary in of_one}
    for of_one in measured:
        by_title = {summary.title: summary for summary in of_one}
        for title, row in rows.items():
            row.append(_range(by_title[title].ratios) if title in by_title else "not measured")
    header = ["worst, median and best", *(_processor(of_one[0].machine) for of_one in measured)]
    return _report.table(header, [[title, *row] for title, row in rows.items()])


def _range(ratios: Mapping[str, float]) -> str:
    values = ratios.values()
    return f"{min(values):.2f}, {statistics.median(values):.2f}, {max(values):.2f} ({len(values)} cases)"


def _processor(machine: Mapping[str, str]) -> str:
    return f"{machine['cpu']}, {machine['date']}"


def plot(folder: pathlib.Path, path: pathlib.Path) -> None:
    """A dot for each row, a line for each suite."""
    figure = _plot.begin("summary")
    shown = summaries(folder)
    drawn = figure(figsize=(8, 0.6 + 0.3 * len(shown)), facecolor="white")
    panel = drawn.subplots()
    for y, summary in enumerate(shown):
        values = list(summary.ratios.values())
        panel.plot(values, [y] * len(values), "o", color="tab:blue", alpha=0.4, markeredgewidth=0)
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(importlib.import_module("matplotlib.ticker").FormatStrFormatter("%g"))
    panel.set_xlabel("times as fast as the best peer: one dot for each case")
    panel.set_yticks(range(len(shown)), [summary.title for summary in shown])
    panel.grid(axis="x", alpha=0.3)
    panel.set_ylim(len(shown) - 0.5, -0.5)
    _plot.save(drawn, path)


def _read(path: pathlib.Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _suites(folder: pathlib.Path) -> Iterator[tuple[str, Any]]:
    for suite, title in TITLES.items():
        if (data := _read(folder / f"{suite}.json")) is not None:
            yield title, data


def _of_rows(data: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The points of a curve are in its plot, and memory is not a speed."""
    for count, part in data["threads"].items():
        for row in part["rows"]:
            if row["curve"] is not None or row["unit"] == "MB":
                continue
            if OURS in {family(name) for name in row["failed"]}:
                raise ValueError(
                    f"{data['suite']}: expected a figure of {OURS} for {row['case']!r}; got {row['failed']}. Mend it."
                )
            ratio = Goal(BEST).reached(right_figures(row), row["unit"])
            if ratio is not None:
                yield f"{row['case']}, {count} thread{'s' * (count != '1')}", ratio


def _of_model(data: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for count, speeds in data["threads"].items():
        peers = [name for name in speeds if not name.startswith((OURS, "probe"))]
        for ours in (name for name in speeds if name.startswith(OURS)):
            for what, (_, median, _) in speeds[ours].items():
                case = f"{what}, {ours.removeprefix(OURS + ', ')}, {count} thread{'s' * (count != '1')}"
                yield case, median / max(speeds[peer][what][1] for peer in peers)
