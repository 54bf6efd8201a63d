"""Results as SVG: how many times as fast as each peer ours is, for each row; and curves, for rows that are points of one."""

import importlib
import importlib.util
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ._rows import OURS, best_of_row, is_less_better, right_figures, speed
from ._timing import family


_COLOURS = {
    OURS: "black",
    "XLA": "tab:blue",
    "jax.nn": "tab:cyan",
    "Equinox": "tab:green",
    "torch": "tab:orange",
    "probe": "tab:gray",
}


def require() -> None:
    """Raises if there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "benchmarks: expected matplotlib for the plots, and it is not installed. pip install matplotlib."
        )


def plot(data: Mapping[str, Any], path: pathlib.Path) -> None:
    figure = begin(data["suite"])
    curves = _curves(data)
    drawn = _draw_curves(figure, data["title"], curves) if curves else _draw_ratios(figure, data)
    save(drawn, path)


def begin(name: str) -> Any:
    """matplotlib's class of figures, set to make the same file of the same results."""
    require()
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 8})
    return importlib.import_module("matplotlib.figure").Figure


def save(figure: Any, path: pathlib.Path) -> None:
    figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None})


def _draw_ratios(figure: Any, data: Mapping[str, Any]) -> Any:
    """One panel for each number of threads, one line for each row, one dot for each peer, and a bar at each goal."""
    threads: Mapping[str, Any] = data["threads"]
    height = max(len(part["rows"]) for part in threads.values())
    drawn = figure(figsize=(3.5 + 3 * len(threads), 1.2 + 0.2 * height), layout="constrained")
    panels = drawn.subplots(1, len(threads), sharey=True, squeeze=False)[0]
    dots: dict[str, Any] = {}
    for panel, (count, part) in zip(panels, threads.items(), strict=True):
        rows, named = part["rows"], set()
        for y, row in enumerate(rows):
            for peer in dict.fromkeys(family(name) for name in row["figures"]):
                ratio = speed(right_figures(row), row["unit"], OURS, peer)
                if ratio is None or ratio <= 0 or peer == OURS:
                    continue
                colour = _COLOURS.get(peer, "tab:red")
                panel.plot(ratio, y, "o", color=colour, label=None if peer in named else peer)
                named.add(peer)
                for goal in row["goals"]:
                    if goal["goal"].endswith(f" x {peer}"):
                        panel.plot(float(goal["goal"].split()[1]), y, "|", color=colour, markersize=10)
        panel.axvline(1, color="black", linewidth=0.8)
        panel.set_xscale("log")
        panel.set_xlabel(f"{count} thread{'s' * (count != '1')}")
        panel.set_yticks(range(len(rows)), [row["case"] for row in rows])
        panel.grid(axis="x", which="both", alpha=0.3)
        panel.set_ylim(len(rows) - 0.5, -0.5)
        dots |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    drawn.supxlabel("times as fast as the peer; | is a goal")
    drawn.legend(dots.values(), dots, loc="outside upper center", ncols=6, frameon=False, title=data["title"])
    return drawn


def stacked(data: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw a bar for each step, made of its parts in milliseconds."""
    rows = data["rows"]
    drawn = begin(data["suite"])(figsize=(9, 1.2 + 0.3 * len(rows)), layout="constrained")
    panel = drawn.subplots()
    ends = [0.0] * len(rows)
    for part in rows[0]["parts"]:
        widths = [row["parts"][part] * 1e3 for row in rows]
        panel.barh(range(len(rows)), widths, left=ends, label=part)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    panel.set_yticks(range(len(rows)), [f"{row['case']}, {row['contestant']}" for row in rows])
    panel.invert_yaxis()
    panel.set_xlabel("ms of a step, on one core")
    drawn.legend(loc="outside upper center", ncols=4, frameon=False)
    save(drawn, path)


def _curves(data: Mapping[str, Any]) -> dict[tuple[str, str, str], list[Mapping[str, Any]]]:
    """Rows by the name of their curve, what their x is, and the number of threads."""
    curves: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for count, part in data["threads"].items():
        for row in part["rows"]:
            if row["curve"] is not None:
                curves.setdefault((*row["curve"], count), []).append(row)
    return curves


def _draw_curves(figure: Any, title: str, curves: Mapping[tuple[str, str, str], Sequence[Mapping[str, Any]]]) -> Any:
    columns = 3
    drawn = figure(figsize=(4 * columns, 3.2 * -(-len(curves) // columns)), layout="constrained")
    panels = drawn.subplots(-(-len(curves) // columns), columns, squeeze=False).ravel()
    for panel in panels[len(curves) :]:
        panel.remove()
    for panel, ((name, x, count), rows) in zip(panels, curves.items(), strict=False):
        unit = rows[0]["unit"]
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            for peer, best in best_of_row(row).items():
                lines.setdefault(peer, []).append((row["x"], row["figures"][best]))
        for peer, points in lines.items():
            panel.plot(*zip(*points, strict=True), ".-", color=_COLOURS.get(peer, "tab:red"), label=peer)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(f"{name}, {count} thread{'s' * (count != '1')}")
        panel.set_xlabel(x)
        panel.set_ylabel(f"{unit} ({'less' if is_less_better(unit) else 'more'} is better)")
        panel.grid(alpha=0.3)
        panel.legend()
    drawn.suptitle(title)
    return drawn
