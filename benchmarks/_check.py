"""Results against their goals, for people to read."""

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ._rows import goals_text


def check(folder: pathlib.Path, suites: Sequence[str] = ()) -> str:
    """Of these suites, or of all that there are results of."""
    lines, counts = [], {True: 0, False: 0, None: 0}
    for path in sorted(folder.glob("*.json")):
        if suites and path.stem not in suites:
            continue
        data = json.loads(path.read_text())
        for where, row in _rows(data):
            for goal in row["goals"]:
                counts[goal["met"]] += 1
            short = [goal for goal in row["goals"] if goal["met"] is not True]
            if short:
                lines.append(f"{path.stem}{where}: {row['case']}: {goals_text(short)}")
            lines += [
                f"{path.stem}{where}: {row['case']}: {name} differs by {difference:.1e}, which is more than {row['tolerance']:g}"
                for name, difference in row.get("differences", {}).items()
                if not difference <= row["tolerance"]
            ]
    if not sum(counts.values()):
        return f"{folder} has no results with goals: make bench measures them."
    summary = f"{counts[True]} of {sum(counts.values())} goals met, {counts[False]} not, {counts[None]} not measured."
    return "\n".join([*lines, summary])


def _rows(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for row in data.get("rows", ()):
        yield "", row
    threads = data.get("threads", {})
    for count, found in threads.items():
        for row in found.get("rows", ()):
            yield f", {count} thread{'s' * (count != '1')}", row
