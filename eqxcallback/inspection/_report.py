"""The report of an inspection, and its text."""

import dataclasses
import os
import pathlib
import textwrap

from ..backends import Launched
from ..xla import KernelHandle
from ._html import page
from ._profile import Profile


_WIDTH = 120
_INDENT = "    "


@dataclasses.dataclass(frozen=True)
class Alias:
    """A result that overwrites an operand.

    **Attributes:**

    - `operand`, `result`: flat indices over the operands and results of the kernel.
    - `state`: `"in place"`, `"copied"` (XLA copies the operand first), or `None` where only a compiled program can tell.
    - `reason`: why it is copied: `"not donated"`, an argument of the program that the caller keeps; `"live later"`, somebody
        in the program still needs the operand; `"a constant"`; `"XLA's choice"`, nothing of these, as where the memory of a
        donated argument was given to another result.
    """

    operand: int
    result: int
    state: str | None
    reason: str = ""

    def __str__(self) -> str:
        state = "unknown until compiled" if self.state is None else self.state
        return f"operand {self.operand} -> result {self.result}: {state}" + (f" ({self.reason})" if self.reason else "")


@dataclasses.dataclass(frozen=True)
class ExternalCall:
    """A call in a program that leaves what XLA has compiled, or would do so on another platform.

    **Attributes:**

    - `path`: the path of transformations, named scopes and layers down to it.
    - `op`: the name of the layer, of the op, or of the callback.
    - `kind`: `"forward"`, `"jvp"`, `"vjp"`, or `"callback"` for what has no derivative of its own.
    - `lane`: `"native"` (C++ alone), `"python"`, `"jax"` (a [`eqxcallback.JaxKernel`][], whose own calls are the next
        rows), `"reference"` (no kernel: the op in pure JAX, compiled by XLA), and for JAX's own calls `"ffi"` or
        `"jax callback"`.
    - `target`: the name of XLA's custom call, or `None`.
    - `operands`, `results`: the types that the kernel sees, such as `"float32[3,4]"`. Under `vmap` with the mapped axes.
    - `in_place`: for each result that overwrites an operand, whether XLA copies the operand first.
    - `captured`, `captured_reason`: whether XLA has planned to record it into a command buffer, and how or why not. `None` where
        the program was not compiled for a GPU, and XLA would decide.
    - `fallback`: why the reference runs, or `""`.
    - `passed_over`: for each kernel that would have run before this one, its name and why it does not support the call.
    - `handle`: the kernel's [`eqxcallback.KernelHandle`][]; `None` where JAX code runs, and for JAX's own calls.
    - `times`: how often it is called in one run of the program, or `None` if that depends on data. Branches of
        `jax.lax.cond` count as if they were taken.
    - `hint`: how it could be faster: with a `vmap_method`, where none is stated.
    - `launches`: for a kernel on a GPU, the blocks, threads, registers and shared memory of each launch. In a program over
        several devices each part has its own, and this is what the whole call would have.
    - `examples`: for how many examples of a `vmap` XLA's threads call the kernel in each, with `vmap_method = "threads"`; or 1.
    - `note`: what else there is to say, such as that XLA has removed it.
    """

    path: str
    op: str
    kind: str
    lane: str
    target: str | None
    operands: tuple[str, ...]
    results: tuple[str, ...]
    in_place: tuple[Alias, ...]
    captured: bool | None
    captured_reason: str
    fallback: str
    times: int | None
    note: str = ""
    handle: KernelHandle | None = None
    passed_over: tuple[tuple[str, str], ...] = ()
    hint: str = ""
    launches: tuple[Launched, ...] = ()
    examples: int = 1


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The external calls of a program. Its `str` is a table.

    **Attributes:**

    - `program`: the name of the function.
    - `platform`: what it was lowered for.
    - `stage`: `"compiled"`, so that copies are known; `"lowered"`; or `"traced"`, for another platform where callbacks of JAX's
        keep it from being lowered.
    - `calls`: in the order of the program.
    - `device`: the GPU that it was compiled for, if that is only described, or `""`.
    - `not_compiled`: why not, or `""`.
    - `host_calls`: for each time that it was run, how often the host called a kernel in Python or one of our launcher. What a
        GPU replays from a command buffer it does not call.
    - `profile`: where the time of a run goes, if that was asked for.
    """

    program: str
    platform: str
    stage: str
    calls: tuple[ExternalCall, ...]
    device: str = ""
    not_compiled: str = ""
    host_calls: tuple[int, ...] = ()
    profile: Profile | None = None

    def __str__(self) -> str:
        return _table(self) if self.profile is None else f"{_table(self)}\n\n{self.profile}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page of HTML that needs no other file: the calls, and of a profile its table, a timeline, and a roofline plot.

        **Arguments:**

        - `path`: a file whose name ends in `.html`. One that exists is overwritten.

        **Raises:** `ValueError` for another suffix; `OSError` if the file cannot be written.
        """
        path = pathlib.Path(path)
        if path.suffix != ".html":
            raise ValueError(f"Inspection.save: expected a path that ends in .html; got {str(path)!r}.")
        path.write_text(page(f"{self.program} on {self.platform}", _table(self), self.profile), encoding="utf-8")


def _table(inspection: Inspection) -> str:
    """A row for each call, with what there is to say about it below."""
    calls = inspection.calls
    count = "1 external call" if len(calls) == 1 else f"{len(calls) or 'no'} external calls"
    head = f"{inspection.program}: {count}, {inspection.stage} for {inspection.platform}"
    if inspection.device:
        head += f" ({inspection.device}, described)"
    if inspection.not_compiled:
        why = f"not compiled: {inspection.not_compiled}"
        head = "\n".join([head, *_wrapped(why)])
    if inspection.host_calls:
        head += f"\n{_INDENT}calls from the host in each run: {', '.join(map(str, inspection.host_calls))}"
    if not calls:
        return head
    rows = [("op", "kind", "lane", "target", "times", "path"), *map(_row, calls)]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [_line(row, widths) for row in rows]
    text = [head, "", lines[0]]
    reasons = {_captured(call) for call in calls}
    for call, line in zip(calls, lines[1:], strict=True):
        text.append(line)
        for detail in _details(call, with_captured=len(reasons) > 1):
            text += _wrapped(detail)
    if len(reasons) == 1:
        text += ["", *textwrap.wrap(f"captured: {reasons.pop()}", _WIDTH, subsequent_indent=_INDENT)]
    return "\n".join(text)


def _wrapped(text: str) -> list[str]:
    # Names of packages have hyphens.
    return textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT * 2, break_on_hyphens=False)


def _row(call: ExternalCall) -> tuple[str, ...]:
    times = "?" if call.times is None else str(call.times)
    return call.op, call.kind, call.lane, call.target or "-", times, call.path


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(row[:5], widths, strict=True)]
    line = "  ".join([*cells, row[5]])
    # The path is the end of the line: where there is no room for it, its own end says most.
    room = _WIDTH - (len(line) - len(row[5]))
    return line if len(row[5]) <= room or room < 20 else line[: len(line) - len(row[5])] + "..." + row[5][3 - room :]


def _captured(call: ExternalCall) -> str:
    state = {True: "yes", False: "no", None: "unknown"}[call.captured]
    return f"{state}, {call.captured_reason}"


def _details(call: ExternalCall, with_captured: bool) -> list[str]:
    details = [f"({', '.join(call.operands)}) -> ({', '.join(call.results)})"]
    if call.examples != 1:
        details.append(f"for each of {call.examples} examples, on XLA's threads")
    details += [f"launch {launch}" for launch in call.launches]
    details += [str(alias) for alias in call.in_place]
    if with_captured:
        details.append(f"captured: {_captured(call)}")
    if call.fallback:
        details.append(f"reference: {call.fallback}")
    details += [f"not the {name}: {reason}" for name, reason in call.passed_over]
    return details + [text for text in (call.hint, call.note) if text]
