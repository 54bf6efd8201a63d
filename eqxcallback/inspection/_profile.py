"""The profile of a program: where the time of a run goes, against what the machine can do."""

import collections
import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of the machine, as measured once in a process, by all processors together.

    **Attributes:**

    - `threads`: how many took part, as many as XLA has.
    - `bytes_per_second`: how fast they read memory.
    - `flops_per_second`: how many operations of f32 they do, with fused multiply-adds in registers.
    """

    threads: int
    bytes_per_second: float
    flops_per_second: float


@dataclasses.dataclass(frozen=True)
class ProfileRow:
    """A part of a run: external calls that are alike, or XLA's instructions of one kind.

    **Attributes:**

    - `name`: of the op, layer or callback; for XLA's own code the opcode, such as `"dot"`, or the target of a custom call.
    - `kind`, `lane`: as of an `ExternalCall`; `""` and `"xla"` for XLA's own code. A product of matrices that is this package's
        kernel, as [`eqxcallback.ops.linear`][] has it on some processors, has its target as a name and the lane `"native"`.
    - `path`, `operands`, `results`: as of an `ExternalCall`; empty for XLA's own code.
    - `calls`: the indices in `Inspection.calls` of the calls that it stands for. They agree in all that is shown.
    - `count`: how often they ran in one run. It is counted, not declared.
    - `seconds`: of one run: how long at least one of them ran, the median of all runs.
    - `bytes`: what they read and write in one run: operands and results, an array that is passed twice counted once. Where
        XLA takes or updates a slice, it is the slice.
    - `at_most`: whether `bytes` is an upper bound: calls that overwrite an operand may touch only a part of it.
    - `flops`: the operations in one run, by XLA's count: of a call's reference, or of the instructions. `None` if unknown.
    - `share`: how much of `seconds` the machine would need at its limits, 1.0 being as fast as it can. Data that stays in the
        processor's caches is read faster than memory, so that small arrays may exceed 1.0. `None` if there is nothing to compare.
    - `bound`: the limit that `share` is of: `"bytes"`, `"flops"`, or `""`.
    """

    name: str
    kind: str
    lane: str
    path: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    calls: tuple[int, ...]
    count: int
    seconds: float
    bytes: int
    at_most: bool
    flops: float | None
    share: float | None
    bound: str


@dataclasses.dataclass(frozen=True)
class Span:
    """A thunk of XLA's in the timeline of one run.

    **Attributes:**

    - `row`: the index of its row in `Profile.rows`.
    - `thread`: the thread that started it, counted from 0. A kernel may use more.
    - `start`, `end`: seconds since the run began.
    """

    row: int
    thread: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """A run of a program, by what took its time. Times are medians of `repeats` runs.

    **Attributes:**

    - `repeats`: how many runs were timed without the profiler, and how many with it.
    - `seconds`: of one run, without the profiler: from the call until its results are there.
    - `profiled_seconds`: of one run with the profiler, which all that follows is part of.
    - `rows`: the longest first.
    - `other_seconds`: the time in which nothing of any row ran: to start the program, to go from thunk to thunk, to wait.
    - `overlap_seconds`: the time that is counted more than once, as rows ran side by side. The sum of the rows and of
        `other_seconds` exceeds `profiled_seconds` by so much, but for the medians.
    - `limits`: what the rows are compared with.
    - `spans`: the timeline of the run whose time was the median.
    """

    repeats: int
    seconds: float
    profiled_seconds: float
    rows: tuple[ProfileRow, ...]
    other_seconds: float
    overlap_seconds: float
    limits: Limits
    spans: tuple[Span, ...] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return _table(self)


_WIDTH = 120
# More than other programs on the machine usually cause.
_MUCH_SLOWER = 1.5
_HEAD = ("op", "lane", "count", "ms", "of run", "MB", "GB/s", "GFLOP/s", "of limit", "path")


def headline(profile: Profile) -> str:
    """Say what was measured, and the machine's limits."""
    limits, runs = profile.limits, "1 run" if profile.repeats == 1 else f"{profile.repeats} runs"
    lines = [
        f"{profile.seconds * 1e3:.3f} ms, median of {runs}; {profile.profiled_seconds * 1e3:.3f} ms with the profiler",
        f"limits, {limits.threads} threads: {limits.bytes_per_second / 1e9:.1f} GB/s read from memory, "
        f"{limits.flops_per_second / 1e9:.0f} GFLOP/s in f32",
    ]
    slower = profile.profiled_seconds / max(profile.seconds, 1e-9)
    if slower > _MUCH_SLOWER:
        lines.append(
            f"{slower:.1f} times as long with the profiler: rows of many short steps seem longer than they are"
        )
    return "\n".join(lines)


def title(row: ProfileRow) -> str:
    """Return what a row is called: a derivative is told from the op that it is of."""
    return f"{row.name} {row.kind}" if row.kind in ("jvp", "vjp") else row.name


def cells(profile: Profile) -> list[tuple[str, ...]]:
    """Return the table as text: the head, a row for each row, then what no row has, and a run."""
    whole = profile.profiled_seconds

    def total(name: str, seconds: float) -> tuple[str, ...]:
        return name, "", "", f"{seconds * 1e3:.3f}", f"{seconds / whole:.1%}", "", "", "", "", ""

    names = collections.Counter((title(row), row.path) for row in profile.rows)
    rows: list[tuple[str, ...]] = [_HEAD]
    for row in profile.rows:
        is_alone = names[title(row), row.path] == 1
        rows.append((*_cells(row, whole), row.path if is_alone else f"{row.path} {_types(row)}"))
    rows.append(total("other", profile.other_seconds))
    if profile.overlap_seconds > 0.001 * whole:
        rows.append(total("side by side", -profile.overlap_seconds))
    return [*rows, total("a run", whole)]


def _cells(row: ProfileRow, whole: float) -> tuple[str, ...]:
    sign, seconds = "<=" if row.at_most else "", max(row.seconds, 1e-9)
    rate = f"{row.flops / seconds / 1e9:.1f}" if row.flops else "" if row.flops is not None else "?"
    at_most = sign if row.bound == "bytes" else ""
    limit = "" if row.share is None else f"{at_most}{row.share:.0%} {row.bound}"
    return (
        title(row),
        row.lane,
        str(row.count),
        f"{row.seconds * 1e3:.3f}",
        f"{row.seconds / whole:.1%}",
        f"{sign}{row.bytes / 1e6:.3f}",
        f"{sign}{row.bytes / seconds / 1e9:.1f}",
        rate,
        limit,
    )


def _types(row: ProfileRow) -> str:
    return f"({', '.join(row.operands)}) -> ({', '.join(row.results)})"


def _table(profile: Profile) -> str:
    rows = cells(profile)
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD) - 1)]
    lines = []
    for row in rows:
        aligned = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        line, path = "  ".join(aligned), row[-1]
        room = max(20, _WIDTH - len(line) - 2)
        lines.append(f"{line}  {path if len(path) <= room else '...' + path[3 - room :]}".rstrip())
    return "\n".join([f"profile: {headline(profile)}", "", *lines])
