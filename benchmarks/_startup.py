"""Measure the time to a model's first result: imports, tracing, lowering and compiling. Ours beside Equinox's.

Each run is a process of its own, _startup_process.py. The two take turns.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping

from . import _report
from ._process import keeping_modules, run_on
from ._startup_process import OURS, THEIRS


STEPS = {
    "import": "import",
    "first result": "first result of a jitted model",
    "again": "the same for another batch",
    "gradient": "first gradient",
}


def measure_startup(rounds: int, layers: int, cores: set[int]) -> dict[str, dict[str, float]]:
    """The median seconds of each step, by whose layers the model has. In a first round Python compiles its modules."""
    measured: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 + rounds):
            for who, runs in measured.items():
                command = [sys.executable, "-m", "benchmarks._startup_process", who, str(layers)]
                runs.append(json.loads(run_on(cores, command, keeping_modules(folder))))
    return {
        step: {who: statistics.median(run[step] for run in runs[1:]) for who, runs in measured.items()}
        for step in STEPS
    }


def report_startup(steps: Mapping[str, Mapping[str, float]], layers: int) -> str:
    body = []
    for step, seconds in steps.items():
        ours, theirs = seconds[OURS], seconds[THEIRS]
        body.append([STEPS[step], f"{ours:.2f}", f"{theirs:.2f}", f"{ours - theirs:+.2f}", f"{theirs / ours:.2f}"])
    header = [f"a process with {layers} layers", OURS, THEIRS, "more, s", "times as fast"]
    return _report.table(header, body)
