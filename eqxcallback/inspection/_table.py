"""The text of an inspection."""

import textwrap
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from ._report import ExternalCall, Inspection


_WIDTH = 120
_INDENT = "    "


def table(inspection: "Inspection") -> str:
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


def _row(call: "ExternalCall") -> tuple[str, ...]:
    times = "?" if call.times is None else str(call.times)
    return call.op, call.kind, call.lane, call.target or "-", times, call.path


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(row[:5], widths, strict=True)]
    line = "  ".join([*cells, row[5]])
    # The path is the end of the line: where there is no room for it, its own end says most.
    room = _WIDTH - (len(line) - len(row[5]))
    return line if len(row[5]) <= room or room < 20 else line[: len(line) - len(row[5])] + "..." + row[5][3 - room :]


def _captured(call: "ExternalCall") -> str:
    state = {True: "yes", False: "no", None: "unknown"}[call.captured]
    return f"{state}, {call.captured_reason}"


def _details(call: "ExternalCall", with_captured: bool) -> list[str]:
    details = [f"({', '.join(call.operands)}) -> ({', '.join(call.results)})"]
    details += [str(alias) for alias in call.in_place]
    if with_captured:
        details.append(f"captured: {_captured(call)}")
    if call.fallback:
        details.append(f"reference: {call.fallback}")
    return details + ([call.note] if call.note else [])
