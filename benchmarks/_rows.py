"""The measurements of a benchmark, as data and as tables: rows, their goals, and the setting they are measured in.

Names of contestants: `"XLA: einsum"` is one formulation of the family `"XLA"`, of which the best one counts.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _report
from ._timing import Clock, Race, Runner, Timing, family, race


OURS = "eqxcallback"

# What a figure is, from the work and the seconds of a call. The last are times: less is better.
_PER_SECOND = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "GB/s": 1e9, "tokens/s": 1.0, "sentences/s": 1.0}
_EACH = {"us": 1e6, "ms": 1e3, "s": 1.0}
# By how much one call makes the process larger.
_MEMORY = {"MB": 1e6}


def is_less_better(unit: str) -> bool:
    return unit in _EACH or unit in _MEMORY


def best_of(figures: Mapping[str, float], unit: str) -> dict[str, str]:
    """The contestant that counts, of each family."""
    best: dict[str, str] = {}
    for name, figure in figures.items():
        rival = best.setdefault(family(name), name)
        if figure != figures[rival] and (figure < figures[rival]) == is_less_better(unit):
            best[family(name)] = name
    return best


def speed(figures: Mapping[str, float], unit: str, of: str, base: str) -> float | None:
    """Return how many times as good as the best of one family the best of another is, if both were measured."""
    best = best_of(figures, unit)
    if of not in best or base not in best:
        return None
    ours, theirs = figures[best[of]], figures[best[base]]
    return theirs / max(ours, 1e-12) if is_less_better(unit) else ours / max(theirs, 1e-12)


# The base of a goal that is relative to the fastest peer of its row. Probes are not peers.
BEST = "best peer"


@dataclasses.dataclass(frozen=True)
class Goal:
    """`of` has to be at least `ratio` times as good as `base`, a family or `BEST`; a base that is a number is what `of` may take,
    where less is better, or has to reach."""

    base: str | float
    ratio: float = 1.0
    of: str = OURS

    def text(self, unit: str) -> str:
        if isinstance(self.base, str):
            return f">= {self.ratio:g} x {self.base}"
        return f"{'<=' if is_less_better(unit) else '>='} {self.base:g}"

    def reached(self, figures: Mapping[str, float], unit: str) -> float | None:
        """The ratio to the goal's base, or the figure where that is a number, if it was measured."""
        if self.base == BEST:
            peers = {family(name) for name in figures} - {"probe", self.of}
            ratios = [speed(figures, unit, self.of, peer) for peer in peers]
            return min((ratio for ratio in ratios if ratio is not None), default=None)
        if isinstance(self.base, str):
            return speed(figures, unit, self.of, self.base)
        best = best_of(figures, unit).get(self.of)
        return None if best is None else figures[best]

    def is_met(self, figures: Mapping[str, float], unit: str) -> bool | None:
        ratio = self.reached(figures, unit)
        if ratio is None:
            return None
        if isinstance(self.base, str):
            return ratio >= self.ratio
        return ratio <= self.base if is_less_better(unit) else ratio >= self.base

    def missing(self, figures: Mapping[str, float], unit: str) -> float | None:
        """The share of the goal that is not reached."""
        ratio = self.reached(figures, unit)
        if ratio is None:
            return None
        if isinstance(self.base, str):
            return max(0.0, 1 - ratio / self.ratio)
        return max(0.0, 1 - (self.base / max(ratio, 1e-12) if is_less_better(unit) else ratio / self.base))

    def as_data(self, figures: Mapping[str, float], unit: str) -> dict[str, Any]:
        reached, missing = self.reached(figures, unit), self.missing(figures, unit)
        return {
            "goal": self.text(unit) if self.of == OURS else f"{self.of} {self.text(unit)}",
            "ratio": None if reached is None else round(reached, 4),
            "met": self.is_met(figures, unit),
            "missing": None if missing is None else round(missing, 4),
        }


@dataclasses.dataclass(frozen=True)
class Row:
    """**Attributes:**

    - `case`: what was measured.
    - `unit`: of the figures.
    - `work`: of one call: operations, bytes, tokens, or for a time the number of things that took it.
    - `goals`: none where there is nothing to win.
    - `more_work`: of contestants that do more or less of it.
    - `curve`, `x`: of rows that are the points of one curve: its name with what `x` is, and where this row is on it.
    - `tolerance`: of the differences between the results of contestants.
    """

    case: str
    unit: str
    work: float
    race: Race
    goals: tuple[Goal, ...] = ()
    more_work: Mapping[str, float] = dataclasses.field(default_factory=dict)
    curve: tuple[str, str] | None = None
    x: float | None = None
    tolerance: float = 0.05

    @property
    def figures(self) -> dict[str, float]:
        if self.unit in _MEMORY:
            known = {name: memory.peak for name, memory in self.race.memory.items()}
            return {name: peak / _MEMORY[self.unit] for name, peak in known.items() if peak is not None}
        return {name: self._figure(name, timing) for name, timing in self.race.seconds.items()}

    def _figure(self, name: str, timing: Timing) -> float:
        work = self.more_work.get(name, self.work)
        if self.unit in _EACH:
            return timing.median / work * _EACH[self.unit]
        return work / timing.median / _PER_SECOND[self.unit]

    def as_data(self) -> dict[str, Any]:
        figures = {name: float(f"{figure:.6g}") for name, figure in self.figures.items()}
        right = _right(figures, self.race.differences, self.tolerance)
        return {
            "case": self.case,
            "unit": self.unit,
            "figures": figures,
            "seconds": {name: timing._asdict() for name, timing in self.race.seconds.items()},
            "memory": {name: memory._asdict() for name, memory in self.race.memory.items()},
            "differences": self.race.differences,
            "tolerance": self.tolerance,
            "tried": self.race.tried,
            "failed": self.race.failed,
            "goals": [goal.as_data(right, self.unit) for goal in self.goals],
            "curve": self.curve,
            "x": self.x,
        }


def _right(figures: Mapping[str, float], differences: Mapping[str, float], tolerance: float) -> dict[str, float]:
    return {name: figure for name, figure in figures.items() if differences.get(name, 0.0) <= tolerance}


def right_figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of contestants that computed what ours did, from the data of a row. The others do not count."""
    return _right(row["figures"], row["differences"], row["tolerance"])


def best_of_row(row: Mapping[str, Any]) -> dict[str, str]:
    """The contestant that counts, of each family, in the data of a row."""
    return best_of(right_figures(row), row["unit"])


@dataclasses.dataclass(frozen=True)
class Setting:
    """The setting in which a part measures.

    **Attributes:**

    - `tiny`: sizes for a machine without time or a GPU, where every path of the code should run once.
    - `quick`: the most important cases alone.
    - `torch`: whether PyTorch is a contestant.
    - `threads`: how many cores there are.
    - `passes`: how often each row is measured: by itself at first, `Race.again` does the others.
    - `memory`: whether the memory of one call is measured as well.
    - `best_only`: whether formulations that are far behind others are tried once only.
    - `ends`: when there is no more time, by `time.monotonic`.
    """

    clock: Clock
    tiny: bool = False
    quick: bool = False
    torch: bool = True
    threads: int = 1
    passes: int = 1
    memory: bool = False
    best_only: bool = False
    ends: float = float("inf")

    def has_time(self) -> bool:
        return time.monotonic() < self.ends

    def race(self, contestants: Mapping[str, Callable[[], Runner]], *, timed: bool = True) -> Race:
        """Each of the passes takes its share of the rounds. Without `timed`, only memory and results are asked for."""
        rounds, seconds = (2, 0.0) if self.tiny else (6, 0.02) if self.quick else (10, 0.05)
        return race(
            contestants,
            rounds=max(2, rounds // self.passes) if timed else 0,
            round_seconds=seconds,
            memory=self.memory or not timed,
            best_only=self.best_only and timed,
        )


def tables(rows: Sequence[Mapping[str, Any]], *, details: bool = False) -> str:
    """Markdown, from the data of rows: those of one unit and the same families are one table.

    With `details` there are columns for the quartiles of ours, relative to its median, and for the memory of one call.
    """
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["unit"], *_families(row)), []).append(row)
    return "\n\n".join(_table(unit, names, group, details) for (unit, *names), group in groups.items())


def _families(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Ours first."""
    names = dict.fromkeys(family(name) for name in (*row["figures"], *row["failed"]))
    return (*([OURS] if OURS in names else []), *(name for name in names if name != OURS))


def _table(unit: str, names: Sequence[str], rows: Sequence[Mapping[str, Any]], details: bool) -> str:
    lines, has_details = [], details and OURS in names and unit not in _MEMORY
    for row in rows:
        cells = [_cell(row, name) for name in names]
        if has_details:
            cells[1:1] = [_spread(row), _memory(row)]
        lines.append([row["case"], *cells, goals_text(row["goals"])])
    header = [unit, *names]
    if has_details:
        header[2:2] = ["quartiles", "MB (XLA's)"]
    return _report.table([*header, "goals"], lines)


def _cell(row: Mapping[str, Any], name: str) -> str:
    """The best figure of a family, how many times as fast ours is, and which one it was if there are several."""
    figures, unit = right_figures(row), row["unit"]
    best = best_of_row(row).get(name)
    if best is None:
        if any(family(contestant) == name for contestant in row["figures"]):
            return "wrong"
        why = next(why for failed, why in row["failed"].items() if family(failed) == name)
        return "not installed" if why.startswith("ModuleNotFoundError") else "failed"
    text = figure_text(figures[best])
    ratio = speed(figures, unit, OURS, name)
    if name != OURS and ratio is not None:
        text += f" ({ratio:.2f})"
    rivals = [
        contestant for contestant in (*row["figures"], *row["failed"], *row["tried"]) if family(contestant) == name
    ]
    return text if len(rivals) == 1 else f"{text} {best.removeprefix(f'{name}: ')}"


def _spread(row: Mapping[str, Any]) -> str:
    seconds = row["seconds"].get(best_of_row(row).get(OURS))
    if seconds is None:
        return ""
    low, high = (seconds[end] / seconds["median"] - 1 for end in ("low", "high"))
    return f"{low:+.0%} {high:+.0%}"


def _memory(row: Mapping[str, Any]) -> str:
    best = best_of_row(row)
    peaks = [row["memory"].get(best.get(name), {}).get("peak") for name in (OURS, "XLA")]
    ours, theirs = ("" if peak is None else figure_text(peak / 1e6) for peak in peaks)
    return f"{ours} ({theirs})" if theirs else ours


def goals_text(goals: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(map(_goal_text, goals))


def _goal_text(goal: Mapping[str, Any]) -> str:
    words = {None: "not measured", True: "yes", False: "no"}
    return f"{goal['goal']}: {words[goal['met']]}" + ("" if goal["ratio"] is None else f", {goal['ratio']:.2f}")


def figure_text(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.2f}" if figure >= 0.1 else f"{figure:.2g}"


def one_line(row: Mapping[str, Any]) -> str:
    figures = ", ".join(f"{name} {figure:.4g}" for name, figure in row["figures"].items())
    failed = "".join(f"; {name} failed: {why}" for name, why in row["failed"].items())
    wrong = "".join(
        f"; {name} differs by {d:.1e}" for name, d in row["differences"].items() if not d <= row["tolerance"]
    )
    return f"{row['case']}: {figures} {row['unit']}{failed}{wrong}"
