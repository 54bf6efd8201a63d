"""The end of a training: a table of speed and memory, and a plot of the losses."""

import importlib
import importlib.util
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .tasks import FUSED, PLAIN, Task
from .trainer import Memory


PLOT = "losses.svg"
_NAMES = {FUSED: "eqxcallback", PLAIN: "equinox.nn"}


def key(contestants: Sequence[str], which: str, figure: str) -> str:
    """Return the name that a figure has in a step's record: plain, but for a second model."""
    return figure if which == contestants[0] else f"{which}_{figure}"


def table(
    contestants: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    memory: Mapping[str, Memory | None],
    task: Task,
) -> str:
    """Return lines of text: a row for each model, and a comparison if there are two.

    **Arguments:**

    - `records`: of all steps.
    - `memory`: of a step of each model.
    """
    seconds = {which: statistics.median(_column(contestants, which, "seconds", records)) for which in contestants}
    lines = [f"{'':12}{'loss':>9}{'ms/step':>10}{task.unit + '/s':>11}{'MB':>8}{'MB beside the state':>22}"]
    for which in contestants:
        planned = memory[which]
        megabytes = ["?", "?"] if planned is None else [f"{b / 1e6:.0f}" for b in (planned.total, planned.temporary)]
        loss = records[-1][key(contestants, which, "loss")]
        lines.append(
            f"{_NAMES[which]:12}{loss:9.4f}{seconds[which] * 1e3:10.1f}{task.units / seconds[which]:11,.0f}"
            f"{megabytes[0]:>8}{megabytes[1]:>22}"
        )
    if len(contestants) == 2:
        ours, theirs = (_column(contestants, which, "loss", records) for which in (FUSED, PLAIN))
        worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
        comparison = f"{seconds[PLAIN] / seconds[FUSED]:.2f} times as fast"
        ours, theirs = memory[FUSED], memory[PLAIN]
        if ours is not None and theirs is not None:
            comparison += f", {ours.total / theirs.total:.2f} of the memory"
            comparison += f" ({ours.temporary / theirs.temporary:.2f} beside the state)"
        lines.append(f"{comparison}; losses differ by {worst:.1e} of themselves at most")
    return "".join(line.rstrip() + "\n" for line in lines)


def plot(contestants: Sequence[str], records: Sequence[Mapping[str, Any]], folder: pathlib.Path) -> str | None:
    """Draw the losses, as SVG.

    **Returns:** why there is no plot, or None.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return f"{PLOT} was not drawn, as matplotlib is not installed"
    matplotlib: Any = importlib.import_module("matplotlib")
    with matplotlib.rc_context({"svg.hashsalt": "losses", "svg.fonttype": "none", "font.size": 8}):
        figure: Any = importlib.import_module("matplotlib.figure").Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.subplots()
        steps = [record["step"] for record in records]
        for which, style in zip(contestants, ("-", "--"), strict=False):  # the second lies on the first
            axes.plot(steps, _column(contestants, which, "loss", records), style, linewidth=1, label=_NAMES[which])
        points = [(record["step"], record["held_out"]) for record in records if "held_out" in record]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color="black", markersize=3, label="held out")
        axes.set(xlabel="step", ylabel="loss", xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(folder / PLOT, format="svg", metadata={"Date": None})
    return None


def _column(contestants: Sequence[str], which: str, figure: str, records: Sequence[Mapping[str, Any]]) -> list[float]:
    return [record[key(contestants, which, figure)] for record in records]
