"""Tables: as JSON and Markdown under benchmarks/results/, and between their markers in the README."""

import json
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def machine() -> dict[str, str]:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {
        "cpu": f"{model}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join([" --- ", *[" ---: "] * (len(header) - 1)]) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def write(name: str, markdown: str, data: dict[str, Any], *, readme: bool = False) -> None:
    """Save a result. With `readme`, its Markdown replaces what is between `<!-- name -->` and `<!-- /name -->`."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine(), **data}, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(markdown + "\n")
    if readme:
        path = ROOT / "README.md"
        text = path.read_text()
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = text.split(begin)
        path.write_text(before + begin + "\n" + markdown + "\n" + end + rest.split(end)[1])
