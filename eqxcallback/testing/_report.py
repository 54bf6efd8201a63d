"""The result of `check`, as data and as a table."""

import dataclasses
import textwrap


OK, FAILED, NOT_APPLICABLE, NOT_RUN = "ok", "failed", "not applicable", "not run"

_WIDTH = 110
_MOST_LINES = 6  # in the details of one row


@dataclasses.dataclass(frozen=True)
class Row:
    """One check.

    **Attributes:**

    - `name`: of the check.
    - `result`: `"ok"`, `"failed"`, `"not applicable"`, or `"not run"`, where there is a kernel that this machine cannot run.
    - `worst_error`: the largest difference that was seen, relative to the largest value of the array it is in; `None` if
        nothing was compared.
    - `seconds`: how long it took, compilation included.
    - `detail`: what is wrong, why it does not apply, or what was left out. May be empty.
    """

    name: str
    result: str
    worst_error: float | None
    seconds: float
    detail: str

    def _cells(self) -> tuple[str, str, str, str]:
        error = "" if self.worst_error is None else f"{self.worst_error:.1e}"
        return self.name, self.result, error, f"{self.seconds:.2f} s"


@dataclasses.dataclass(frozen=True)
class Report:
    """The rows of one [`eqxcallback.testing.check`][]; `str` of it is a table.

    **Attributes:**

    - `subject`: what was checked, as text.
    - `rows`: one for each check, in order.
    """

    subject: str
    rows: tuple[Row, ...]

    @property
    def failed(self) -> tuple[Row, ...]:
        """The rows that failed, the most telling one first."""
        return tuple(row for row in self.rows if row.result == FAILED)

    @property
    def not_run(self) -> tuple[Row, ...]:
        """The rows of kernels that could not be run."""
        return tuple(row for row in self.rows if row.result == NOT_RUN)

    @property
    def passed(self) -> bool:
        """No row failed, and all were run."""
        return not self.failed and not self.not_run

    def __getitem__(self, name: str) -> Row:
        """The row of that name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"there is no row {name!r}; there are {', '.join(row.name for row in self.rows)}.")

    def __str__(self) -> str:
        lines = [("check", "result", "worst error", "time"), *[row._cells() for row in self.rows]]
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        table = []
        for line, row in zip(lines, [None, *self.rows], strict=True):
            name, result, error, time = line
            text = f"{name:<{widths[0]}}  {result:<{widths[1]}}  {error:>{widths[2]}}  {time:>{widths[3]}}"
            if row is not None and row.detail and row.result not in (FAILED, NOT_RUN):
                text = f"{text}  {row.detail}"
            table.append(_cut(text))
        table.insert(1, "-" * min(_WIDTH, sum(widths) + 6))
        title = f"not run: {self.subject}" if self.not_run else self.subject
        reasons = [_wrapped(f"not run: {reason}", "") for reason in dict.fromkeys(row.detail for row in self.not_run)]
        return "\n".join([_cut(title), "", *table, *(["", *reasons] if reasons else [])])

    def details(self) -> str:
        """Say what is wrong for each row that failed, and once for rows that say the same."""
        names: dict[str, list[str]] = {}
        for row in self.failed:
            names.setdefault(row.detail, []).append(row.name)
        return "\n\n".join(_wrapped(f"{', '.join(same)}:", "") + "\n" + _indented(d) for d, same in names.items())


class CheckFailed(AssertionError):
    """A check that failed. The message is the table, and what is wrong in each row.

    **Attributes:**

    - `report`: the `Report`.
    """

    report: Report

    def __init__(self, report: Report):
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        failed = _wrapped(f"failed: {', '.join(row.name for row in self.report.failed)}", "    ")
        return f"{failed}\n\n{self.report}\n\n{self.report.details()}"


def _cut(line: str) -> str:
    line = " ".join(line.splitlines()).rstrip()
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."


def _wrapped(text: str, indent: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH, subsequent_indent=indent))


def _indented(text: str) -> str:
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, _WIDTH - 4) or [""]]
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], f"... and {len(lines) - _MOST_LINES + 1} more lines"]
    return textwrap.indent("\n".join(lines), "    ")
