"""What a part of the GPU benchmarks measures, as data and as tables."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import _report
from ._gpu_timing import Clock, Race, Runner, race
from ._timing import Timing


OURS = "eqxcallback"

# What a figure is, from the work and the seconds of a call. The last are times: less is better.
_PER_SECOND = {"TFLOP/s": 1e12, "GB/s": 1e9, "tokens/s": 1.0}
_EACH = {"us": 1e6, "ms": 1e3}


@dataclasses.dataclass(frozen=True)
class Goal:
    """`of` has to be at least `ratio` of what `base` reaches; a base that is a number is a time, which `of` may take."""

    base: str | float
    ratio: float = 1.0
    of: str = OURS

    def __str__(self) -> str:
        return f"<= {self.base}" if isinstance(self.base, float) else f">= {self.ratio} x {self.base}"

    def reached(self, figures: Mapping[str, float]) -> float | None:
        """The ratio to the goal's base, if both were measured."""
        base = figures.get(self.base) if isinstance(self.base, str) else self.base
        return None if base is None or self.of not in figures else figures[self.of] / base

    def is_met(self, figures: Mapping[str, float]) -> bool | None:
        found = self.reached(figures)
        if found is None:
            return None
        return found <= 1 if isinstance(self.base, float) else found >= self.ratio


@dataclasses.dataclass(frozen=True)
class Row:
    """**Attributes:**

    - `case`: what was measured.
    - `unit`: of the figures.
    - `work`: of one call: operations, bytes, tokens, or for a time the number of things that took it.
    - `more_work`: of contestants that do more or less of it.
    """

    case: str
    unit: str
    work: float
    race: Race
    goal: Goal | None = None
    more_work: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        return {name: self._figure(name, timing) for name, timing in self.race.seconds.items()}

    def _figure(self, name: str, timing: Timing) -> float:
        work = self.more_work.get(name, self.work)
        if self.unit in _EACH:
            return timing.median / work * _EACH[self.unit]
        return work / timing.median / _PER_SECOND[self.unit]

    def as_data(self) -> dict[str, Any]:
        goal = self.goal
        return {
            "case": self.case,
            "unit": self.unit,
            "figures": {name: round(figure, 4) for name, figure in self.figures.items()},
            "seconds": {name: vars(timing) for name, timing in self.race.seconds.items()},
            "differences": self.race.differences,
            "failed": self.race.failed,
            "goal": None if goal is None else str(goal),
            "ratio": None if goal is None else goal.reached(self.figures),
            "met": None if goal is None else goal.is_met(self.figures),
        }


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a part is to measure.

    **Attributes:**

    - `tiny`: sizes for a machine without a GPU, where every path of the code shall run once.
    - `quick`: the most important cases alone.
    - `ends`: when there is no more time, by `time.monotonic`.
    """

    clock: Clock
    tiny: bool = False
    quick: bool = False
    torch: bool = True
    tiles: bool = False
    ends: float = float("inf")

    def has_time(self) -> bool:
        return time.monotonic() < self.ends

    def race(self, contestants: Mapping[str, Callable[[], Runner]]) -> Race:
        if self.tiny:
            return race(contestants, rounds=2, round_seconds=0.002)
        return race(contestants, rounds=5 if self.quick else 9, round_seconds=0.02 if self.quick else 0.05)


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, from the data of rows: those of one unit and the same contestants are one table."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["unit"], *_names(row)), []).append(row)
    return "\n\n".join(_table(unit, names, group) for (unit, *names), group in groups.items())


def _names(row: Mapping[str, Any]) -> Iterable[str]:
    return (*row["figures"], *row["failed"])


def _table(unit: str, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        cells = [_text(row["figures"][name]) if name in row["figures"] else "failed" for name in names]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        met = {None: "", True: "yes", False: "no"}[row["met"]]
        lines.append([row["case"], *cells, ratio, row["goal"] or "", met])
    return _report.table([unit, *names, "ratio", "goal", "met"], lines)


def _text(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.2f}"
