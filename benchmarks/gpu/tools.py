"""Run our kernels under NVIDIA's tools. No JAX is imported here: the tools start the process that does."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from .._process import last_line


# Runs Python with arguments: a name for its log, seconds, and those.
Python = Callable[..., tuple[int | None, str]]

# The program of kernels ends by itself before its tool is ended, which then leaves no report.
_AT_THE_END = 25.0
_TOOLKIT = pathlib.Path("/usr/local/cuda/bin")
# The names of our kernels begin with one of these, in C++ behind their namespace. Some of XLA's end with one: `triton_softmax`.
_OURS = (
    "regex:(^|[^A-Za-z_])(add_normalize|attention|cache_append|cross_entropy|decode_attention|glu|group_norm|gru_gates|lstm_gates"
    "|normalize|quantized_linear|rotary|softmax)"
)


def _kernels(seconds: float) -> tuple[str, ...]:
    return (sys.executable, "-m", "benchmarks.gpu.kernels", "--seconds", str(max(seconds - _AT_THE_END, 1.0)))


def _count(said: str) -> str:
    """Tell how many of the programs ran."""
    counts = re.findall(r"^(\d+ of \d+ programs) ran", said, re.MULTILINE)
    return f" of {counts[-1]}" if counts else ""


def sanitize(python: Python, seconds: float) -> dict[str, Any]:
    """The kernels under each of compute-sanitizer's tools, for so many seconds each."""
    results = {tool: _sanitized(python, tool, seconds) for tool in ("memcheck", "racecheck")}
    oks = [result["ok"] for result in results.values()]
    ok = False if False in oks else None if None in oks else True
    return {
        "ok": ok,
        "says": "; ".join(f"{tool}: {result['says']}" for tool, result in results.items()),
        "tools": results,
    }


def _sanitized(python: Python, tool: str, seconds: float) -> dict[str, Any]:
    program = _tool("compute-sanitizer")
    if program is None:
        return {"ok": None, "says": "compute-sanitizer is not installed"}
    under = (program, "--tool", tool, "--print-limit", "20", "--target-processes", "all", *_kernels(seconds))
    code, said = python(f"sanitizer-{tool}", seconds, "-c", _UNDER, *under)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", said)
    if code is None:
        return {"ok": None, "says": "out of time"}
    # A tool that the machine refuses says so instead of a summary.
    if not summary or "Device not supported" in said:
        return {"ok": None, "says": last_line(said)}
    ok = code == 0 and all(re.match(r"0 (errors|hazards)", line) for line in summary)
    return {"ok": ok, "says": summary[-1] + _count(said)}


def profile(python: Python, seconds: float, folder: pathlib.Path) -> dict[str, Any]:
    """A report of Nsight Compute about each kernel, and its numbers as a table."""
    program = _tool("ncu")
    if program is None:
        return {"ok": None, "says": "ncu is not installed"}
    report = folder / "kernels.ncu-rep"
    report.unlink(missing_ok=True)
    which = ("--clock-control", "none", "--set", "full", "-k", _OURS, "--target-processes", "all", "-f")
    under = (program, *which, "-o", str(report.with_suffix("")), *_kernels(seconds), "--large")
    code, said = python("profile", seconds, "-c", _UNDER, *under)
    if not report.exists():
        return {"ok": None, "says": "out of time" if code is None else last_line(said)}
    command = [program, "--import", str(report), "--csv", "--page", "raw"]
    table = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    (folder / "kernels.csv").write_text(table)
    rows = max(0, len(table.splitlines()) - 2)  # names and units are above them
    return {"ok": rows > 0, "says": f"{rows} launches of kernels{_count(said)}"}


# A process that becomes the tool: what starts it starts Python.
_UNDER = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"


def _tool(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), str(_TOOLKIT)]))
