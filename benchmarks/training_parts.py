"""Measure where the time of a step of training goes, on one core: `python -m benchmarks training_parts`.

A step of each model of the suite `training` runs under JAX's profiler, as `eqxcallback.inspect(profile=True)` has it.
"""

import argparse
import os
import pathlib
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax

import eqxcallback as eqxc
from eqxcallback.inspection import Profile

from . import _report, training
from ._process import compiling_quickly, run_on
from ._rows import OURS, Setting
from ._timing import WaitingClock


PRODUCTS, ATTENTION, NORMS, KERNELS = "products of matrices", "attention", "norms", "other kernels"
LOOPS, COPIES, BETWEEN = "XLA's loops over elements", "XLA's copies", "between"
PARTS = (PRODUCTS, ATTENTION, NORMS, KERNELS, LOOPS, COPIES, BETWEEN)
_COPIES = {
    *("copy", "transpose", "concatenate", "slice", "dynamic-slice", "dynamic-update-slice"),
    *("pad", "gather", "scatter", "reshape", "broadcast"),
}
_REPEATS = {"full": 3, "quick": 1, "tiny": 1}


def part_of(name: str, lane: str) -> str:
    """The part of a step that a row of a profile counts to."""
    if name in ("dot", "convolution", "linear") or "matmul" in name or "matrix_product" in name:
        return PRODUCTS
    if lane != "xla":
        return ATTENTION if "attention" in name else NORMS if "norm" in name else KERNELS
    return COPIES if name in _COPIES else LOOPS


def parts_of(profile: Profile) -> dict[str, float]:
    """The seconds of each part. Parts that ran side by side count both."""
    seconds = defaultdict(float, {BETWEEN: profile.other_seconds})
    for row in profile.rows:
        seconds[part_of(row.name, row.lane)] += row.seconds
    return {part: seconds[part] for part in PARTS}


def measure(mode: str) -> dict[str, Any]:
    setting = Setting(WaitingClock(), tiny=mode == "tiny")
    rows = []
    tasks = list(training.tasks(setting))
    for task, dtype in tasks[:: len(tasks) - 1] if mode == "tiny" else tasks:
        for contestant in (OURS, "Equinox"):
            step, arguments = training.program(task, dtype, contestant)
            profile = eqxc.inspect(jax.jit(step), *arguments, profile=True, repeats=_REPEATS[mode]).profile
            assert profile is not None
            case = f"{task.case}, {jax.numpy.dtype(dtype).name}"
            rows.append(
                {"case": case, "contestant": contestant, "seconds": profile.seconds, "parts": parts_of(profile)}
            )
            print(f"training_parts: {case}, {contestant}: {profile.seconds * 1e3:.0f} ms", file=sys.stderr, flush=True)
    return {"suite": "training_parts", "mode": mode, "machine": _report.machine(), "rows": rows}


def markdown(data: Mapping[str, Any]) -> str:
    lines = []
    for row in data["rows"]:
        total = sum(row["parts"].values())
        shares = [f"{row['parts'][part] / total:.0%}" for part in PARTS]
        lines.append([f"{row['case']}, {row['contestant']}", f"{row['seconds'] * 1e3:,.0f}", *shares])
    return "\n\n".join([_report.table(["a step", "ms", *PARTS], lines), _report.measured_on(data["machine"])])


def in_own_process(mode: str, results: pathlib.Path) -> None:
    command = [sys.executable, "-m", "benchmarks.training_parts", "--mode", mode, "--out", str(results)]
    environment = {"JAX_PLATFORMS": "cpu"} | (compiling_quickly() if mode == "tiny" else {})
    run_on({min(os.sched_getaffinity(0))}, command, environment)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_parts", description=__doc__)
    parser.add_argument("--mode", choices=list(_REPEATS), default="full", help="how many runs, of which models")
    parser.add_argument("--out", type=pathlib.Path, default=_report.RESULTS, help="a folder for the results")
    options = parser.parse_args()
    data = measure(options.mode)
    _report.write("training_parts", markdown(data), data, folder=options.out)


if __name__ == "__main__":
    main()
