"""The plots of a profile, as SVG: the timeline of a run, and a roofline."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from ..core import AnyNumber
from ._profile import Profile, ProfileRow, title


_WIDTH = 960
_LANE = 28
# A timeline has at most so many thunks, the longest.
_SPANS = 4000


def color(row: int) -> str:
    """Return the color of a row, in both plots and the table."""
    return f"hsl({row * 137.5 % 360:.0f} 60% 50%)"  # neighbours are far apart


def timeline(profile: Profile) -> str:
    """Draw a lane for each thread that started thunks, and in it what ran when."""
    spans = sorted(profile.spans, key=lambda span: span.start - span.end)[:_SPANS]
    whole = max([profile.profiled_seconds, *(span.end for span in spans)])
    lanes = 1 + max((span.thread for span in spans), default=0)
    height = lanes * _LANE

    def rectangles() -> Iterator[str]:
        for span in sorted(spans, key=lambda span: span.start):
            row, took = profile.rows[span.row], span.end - span.start
            yield (
                f'<rect x="{span.start / whole * _WIDTH:.2f}" y="{span.thread * _LANE + 2}" '
                f'width="{max(took / whole * _WIDTH, 0.3):.2f}" height="{_LANE - 4}" fill="{color(span.row)}">'
                f"<title>{escape(title(row))}: {took * 1e6:.1f} µs at {span.start * 1e3:.3f} ms</title></rect>"
            )

    def ticks() -> Iterator[str]:
        for i in range(6):
            anchor = "start" if i == 0 else "end" if i == 5 else "middle"
            yield _text(i * _WIDTH / 5, height + 16, f"{i * whole / 5 * 1e3:.3g} ms", anchor)

    return _svg(height + 22, [*rectangles(), *ticks()])


def left_out(profile: Profile) -> int:
    """Count the thunks for which the timeline has no room."""
    return max(0, len(profile.spans) - _SPANS)


def is_in_roofline(row: ProfileRow) -> bool:
    """True if the operations of a row are known, and are more than the counters of loops."""
    return bool(row.flops and row.seconds and row.flops > 0.01 * row.bytes > 0)


def roofline(profile: Profile) -> str:
    """Draw operations per second over operations per byte, both logarithmic, under what the machine can do."""
    limits, height, left, bottom = profile.limits, 420, 60, 40
    points = [
        (i, row, (row.flops or 0.0) / row.bytes, (row.flops or 0.0) / row.seconds)
        for i, row in enumerate(profile.rows)
        if is_in_roofline(row)
    ]
    ridge = limits.flops_per_second / limits.bytes_per_second
    across = _decades([ridge, *(intensity for _, _, intensity, _ in points)])
    up = _decades([limits.flops_per_second, *(rate for _, _, _, rate in points)])

    def x(intensity: float) -> float:
        return left + (math.log10(intensity) - across[0]) / (across[-1] - across[0]) * (_WIDTH - left)

    def y(rate: float) -> float:
        return (height - bottom) * (1 - (math.log10(rate) - up[0]) / (up[-1] - up[0]))

    lowest, highest = 10.0 ** across[0], 10.0 ** across[-1]
    start = max(lowest, 10.0 ** up[0] / limits.bytes_per_second)
    corners = [
        (start, start * limits.bytes_per_second),
        (ridge, limits.flops_per_second),
        (highest, limits.flops_per_second),
    ]
    roof = " ".join(f"{x(intensity):.1f},{y(rate):.1f}" for intensity, rate in corners)
    parts = [_line(x(10.0**i), 0, x(10.0**i), height - bottom) for i in across]
    parts += [_line(left, y(10.0**i), _WIDTH, y(10.0**i)) for i in up]
    parts += [_text(x(10.0**i), height - bottom + 16, f"{10.0**i:g}", _anchor(i, across)) for i in across]
    parts += [_text(left - 6, max(10.0, y(10.0**i) + 4), f"{10.0**i / 1e9:g}", "end") for i in up]
    parts.append(_text((left + _WIDTH) / 2, height - 6, "operations per byte", "middle"))
    parts.append(_text(left + 6, 12, "GFLOP/s", "start"))
    parts.append(f'<polyline class="roof" points="{roof}"/>')
    for i, row, intensity, rate in points:
        side = "end" if x(intensity) > 0.8 * _WIDTH else "start"
        parts.append(
            f'<circle cx="{x(intensity):.1f}" cy="{y(rate):.1f}" r="6" fill="{color(i)}">'
            f"<title>{escape(title(row))}: {intensity:.3g} operations per byte, {rate / 1e9:.3g} GFLOP/s</title></circle>"
        )
        parts.append(_text(x(intensity) + (-10 if side == "end" else 10), y(rate) + 4, title(row), side))
    return _svg(height, parts)


def _decades(values: Sequence[float]) -> range:
    """The powers of ten that enclose all values."""
    return range(math.floor(math.log10(min(values)) - 0.1), math.ceil(math.log10(max(values)) + 0.1) + 1)


def _anchor(i: int, decades: range) -> str:
    return "end" if i == decades[-1] else "middle"


def _svg(height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _line(x1: AnyNumber, y1: AnyNumber, x2: AnyNumber, y2: AnyNumber) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: AnyNumber, y: AnyNumber, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
