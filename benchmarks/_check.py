"""Results against their goals, for people to read."""

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ._limits import limit_of
from ._rows import goals_text


# A page of them.
_LINES = 40


def check(folder: pathlib.Path, suites: Sequence[str] = ()) -> str:
    """Report where the results of these suites, or of all, fall short: wrong results, then goals that are missed or were not
    measured, the worst first, with what limits them.
    """
    lines: list[str] = []
    short: list[tuple[float, str]] = []
    counts = {True: 0, False: 0, None: 0}
    for path in sorted(folder.glob("*.json")):
        if suites and path.stem not in suites:
            continue
        data = json.loads(path.read_text())
        for where, row in _rows(data):
            # What a step is made of has none.
            for goal in row.get("goals", ()):
                counts[goal["met"]] += 1
                if goal["met"] is not True:
                    missing = 1.0 if goal["missing"] is None else goal["missing"]
                    text = f"{path.stem}{where}: {row['case']}: {goals_text([goal])}"
                    limit = limit_of(path.stem, row["case"], goal["goal"]) or "not known"
                    short.append((missing, f"{missing:4.0%} missing: {text}; limit: {limit}"))
            lines += [
                f"{path.stem}{where}: {row['case']}: {name} differs by {difference:.1e}, which is more than {row['tolerance']:g}"
                for name, difference in row.get("differences", {}).items()
                if not difference <= row["tolerance"]
            ]
    if not sum(counts.values()):
        return f"{folder} has no results with goals: make bench measures them."
    short.sort(key=lambda row: -row[0])
    lines += [line for _, line in short[:_LINES]]
    if len(short) > _LINES:
        lines.append(f"... and {len(short) - _LINES} of which less is missing.")
    summary = f"{counts[True]} of {sum(counts.values())} goals met, {counts[False]} not, {counts[None]} not measured."
    return "\n".join([*lines, summary])


def _rows(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for row in data.get("rows", ()):
        yield "", row
    threads = data.get("threads", {})
    for count, part in threads.items():
        for row in part.get("rows", ()):
            yield f", {count} thread{'s' * (count != '1')}", row
