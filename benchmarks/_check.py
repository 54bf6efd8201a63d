"""Results against their goals, for people to read."""

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ._limits import limit_of
from ._report import table
from ._rows import goals_text


# A page of them, of all processors.
_LINES = 40


class Miss(NamedTuple):
    """A goal that is not reached, or was not measured, and what limits it."""

    suite: str
    where: str
    case: str
    goal: Mapping[str, Any]
    limit: str

    @property
    def missing(self) -> float:
        return 1.0 if self.goal["missing"] is None else self.goal["missing"]


def check(folder: pathlib.Path, suites: Sequence[str] = (), *, every: bool = False) -> str:
    """Report where the results of these suites, or of all, fall short on each processor: wrong results, then goals that are
    missed or were not measured, the worst first, with what limits them. A page of these, or `every` one.
    """
    read = [results for part in processors(folder) if _goals(results := _read(part, suites))]
    if not read:
        return f"{folder} has no results with goals: make bench measures them."
    limit = None if every else _LINES // len(read)
    if len(read) == 1:
        return "\n".join(_lines(read[0], limit))
    return "\n\n".join("\n".join([f"{_processor(results)}:", *_lines(results, limit)]) for results in read)


def processors(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders of results of each processor: a folder in the first one has those of another processor."""
    return [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]


def misses_of(folder: pathlib.Path) -> list[Miss]:
    """Return the goals that the results of one processor do not reach, the worst first."""
    return _misses(_read(folder, ()))


def table_of_misses(folder: pathlib.Path) -> str:
    """The goals that one processor's results do not reach, and what limits them: a line for what has the same limit."""
    groups: dict[tuple[str, str, str], list[Miss]] = {}
    for miss in misses_of(folder):
        groups.setdefault((miss.suite, miss.goal["goal"], miss.limit), []).append(miss)
    lines = []
    for (suite, goal, limit), misses in groups.items():
        # The worst is first. A figure that has to be small is worst where it is largest.
        ratios = [f"{miss.goal['ratio']:.2f}" for miss in misses if miss.goal["ratio"] is not None]
        reached = " to ".join(dict.fromkeys([ratios[0], ratios[-1]])) if ratios else "not measured"
        lines.append([suite, f"{misses[0].case}{misses[0].where}", str(len(misses)), goal, reached, limit])
    return table(["suite", "the worst row", "rows", "goal", "reached", "what limits it"], lines)


def _read(folder: pathlib.Path, suites: Sequence[str]) -> dict[str, Any]:
    paths = sorted(folder.glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths if not suites or path.stem in suites}


def _processor(results: Mapping[str, Any]) -> str:
    return next((_cpu(data) for data in results.values()), "")


def _cpu(data: Mapping[str, Any]) -> str:
    return data.get("machine", {}).get("cpu", "")


def _lines(results: Mapping[str, Any], limit: int | None) -> list[str]:
    lines = [
        f"{suite}{where}: {row['case']}: {name} differs by {difference:.1e}, which is more than {row['tolerance']:g}"
        for suite, where, row in _rows(results)
        for name, difference in row.get("differences", {}).items()
        if not difference <= row["tolerance"]
    ]
    misses = _misses(results)
    lines += [
        f"{miss.missing:4.0%} missing: {miss.suite}{miss.where}: {miss.case}: {goals_text([miss.goal])}; limit: {miss.limit}"
        for miss in misses[:limit]
    ]
    if limit is not None and len(misses) > limit:
        lines.append(f"... and {len(misses) - limit} of which less is missing.")
    met = [goal["met"] for goal in _goals(results)]
    counts = f"{met.count(True)} of {len(met)} goals met, {met.count(False)} not, {met.count(None)} not measured."
    return [*lines, counts]


def _misses(results: Mapping[str, Any]) -> list[Miss]:
    misses = [
        Miss(suite, where, row["case"], goal, limit or "not known")
        for suite, where, row in _rows(results)
        for goal in row.get("goals", ())
        if goal["met"] is not True
        for limit in [limit_of(_cpu(results[suite]), f"{suite}{where}", row["case"], goal["goal"])]
    ]
    return sorted(misses, key=lambda miss: -miss.missing)


def _goals(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [goal for _, _, row in _rows(results) for goal in row.get("goals", ())]  # what a step is made of has none


def _rows(results: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for suite, data in results.items():
        for row in data.get("rows", ()):
            yield suite, "", row
        for count, part in data.get("threads", {}).items():
            for row in part.get("rows", ()):
                yield suite, f", {count} thread{'s' * (count != '1')}", row
