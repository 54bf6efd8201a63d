"""Tables: as JSON and Markdown under benchmarks/results/, and between their markers in the README and the documentation."""

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ._json import dumps


ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"  # a folder in it has those of another processor


def machine() -> dict[str, str]:
    facts = {
        "cpu": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    for package in ("equinox", "torch", "onnxruntime"):
        if importlib.util.find_spec(package) is not None:
            facts[package] = importlib.metadata.version(package)
    return facts


def _processor() -> str:
    """Name the kind of processor: clouds hide its model behind a name that several share."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    facts: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    if not {"model name", "cpu family", "model"} <= facts.keys():
        return platform.processor()
    return f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join([" --- ", *[" ---: "] * (len(header) - 1)]) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def write(name: str, markdown: str, data: dict[str, Any], *, folder: pathlib.Path = RESULTS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(dumps({"machine": machine(), **data}) + "\n")
    (folder / f"{name}.md").write_text(markdown + "\n")


def put(page: pathlib.Path, name: str, markdown: str) -> None:
    """Replace what a page has between `<!-- name -->` and `<!-- /name -->`."""
    text = page.read_text()
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{page.name}: expected one {begin} and one {end} around what a benchmark writes.")
    before, rest = text.split(begin)
    page.write_text(before + begin + "\n" + markdown + "\n" + end + rest.split(end)[1])


def page_of(folder: pathlib.Path) -> pathlib.Path:
    """Return the page of the results of another processor."""
    return PAGE.with_name(f"{PAGE.stem}_{folder.name}.md")


def measured_on(*machines: Mapping[str, str]) -> str:
    """A sentence that names the machines that results came from: by default this one."""
    abouts = (
        ", ".join(value if key in ("cpu", "date") else f"{key} {value}" for key, value in facts.items())
        for facts in machines or (machine(),)
    )
    return f"Measured on {'; '.join(dict.fromkeys(abouts))}."
