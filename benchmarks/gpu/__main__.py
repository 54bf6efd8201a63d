"""Measure the kernels on a GPU, against peers in the same run: `python -m benchmarks.gpu [--quick] [--tiles]`.

Each part runs in a process of its own, which a crash or a hang of another one does not hurt, and keeps what it has measured when
its time is over. A part that does not fit into what is left of `--seconds` is named, and left out. Peers take turns; medians and
ratios count. Results go to benchmarks/results/gpu.*, from a run of all parts on a GPU only. Without one, `--no-gpu` runs every
part at tiny sizes on the CPU, where the references stand in for kernels.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .. import _report
from .._process import run_for
from .._stored import kept


# Name, title, and the seconds that it needs; in order of value.
PARTS: dict[str, tuple[str, float]] = {
    "probe": ("Probes", 20),
    "attention": ("Attention", 140),
    "memory_bound": ("Memory-bound kernels", 70),
    "options": ("Attention with options", 90),
    "decode": ("A language model", 100),
    "linear": ("Quantised layers, and the loss of a large vocabulary", 60),
    "decode_attention": ("One token over a cache", 35),
    "training": ("Training, and a prompt", 60),
    "launches": ("Launches", 40),
    "tiles": ("Tiles of attention", 200),
}
PAGE = _report.PAGE.with_name("performance_gpu.md")
# Contestants where they are installed, whose absence is said.
_PEERS = ("torch", "tokamax")
# The start of a process, and the end of a row that has begun when the time is over.
_START_AND_END = 12.0


def measurement(part: str) -> Callable[..., Iterator[Any]]:
    """Imported only in the process that measures."""
    module, function = ("attention", "measure_decode") if part == "decode_attention" else (part, "measure")
    return getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)


def measure(part: str, options: argparse.Namespace, path: pathlib.Path) -> None:
    """Write what is known after each row."""
    import jax

    from .._rows import Setting, one_line
    from .timing import find_clock

    ends = time.monotonic() + options.seconds
    if not options.no_gpu:
        jax.devices("gpu")  # raises where there is none
    clock, why = find_clock(not options.no_gpu)
    torch = not (options.no_gpu or options.no_torch) and importlib.util.find_spec("torch") is not None
    setting = Setting(clock, tiny=options.no_gpu, quick=options.quick, torch=torch, ends=ends)
    data: dict[str, Any] = {"clock": clock.name, "clock_why": why, "rows": []}
    for row in measurement(part)(setting):
        data["rows"].append(row.as_data())
        _replace(path, data)
        print(one_line(data["rows"][-1]), flush=True)
    data["is_whole"] = setting.has_time()
    _replace(path, data)


def _replace(path: pathlib.Path, data: Mapping[str, Any]) -> None:
    """Write the file so that whoever ends this process at any time leaves a whole one."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(data))
    new.replace(path)


def measured(part: str, seconds: float, options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """The part in a process of its own."""
    path = folder / f"{part}.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--to", str(path), "--seconds", str(seconds)]
    flags = {"--quick": options.quick, "--no-gpu": options.no_gpu, "--no-torch": options.no_torch}
    command += [flag for flag, is_set in flags.items() if is_set]
    environment = {
        **os.environ,
        # PyTorch is in the same process.
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
        **({"JAX_PLATFORMS": "cpu"} if options.no_gpu else {}),
    }
    start = time.monotonic()
    code, said = run_for(command, seconds + _START_AND_END, environment, _report.ROOT)
    print(said, end="" if said.endswith("\n") else "\n", flush=True)
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
    data["seconds"] = round(time.monotonic() - start, 1)
    if code != 0:
        data["error"] = f"exit code {code}: {said[-1500:]}" if code is not None else "out of time"
    return data


def device() -> dict[str, str]:
    """Describe the GPU, without taking memory of it, and the versions of the peers."""
    facts = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    try:
        facts["gpu"] = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        facts["gpu"] = f"unknown ({error})"
    for name in ("jaxlib", *_PEERS, "triton", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in _PEERS:
                facts[name] = "not installed"
    return facts


def next_part(waiting: Sequence[str], left: float, *, may_shrink: bool) -> tuple[str, float] | None:
    """Return the first part that fits into the seconds that are left, and its own; `None` if none fits. If they may shrink, so
    that all fit, each has its share.
    """
    scale = 1.0
    if may_shrink and waiting:
        scale = min(1.0, (left - _START_AND_END * len(waiting)) / sum(PARTS[part][1] for part in waiting))
    for part in waiting:
        seconds = PARTS[part][1] * scale
        if seconds >= 2 and seconds + _START_AND_END <= left:
            return part, seconds
    return None


def markdown(results: Mapping[str, Any], about: Mapping[str, str]) -> str:
    from .._rows import tables

    sections = []
    for part, data in results.items():
        section = f"## {PARTS[part][0]}\n\n{tables(data['rows'])}" if data["rows"] else f"## {PARTS[part][0]}"
        if "error" in data:
            section += f"\n\nNot finished: {data['error'].strip().splitlines()[-1]}"
        sections.append(section)
    clocks = {data["clock"] for data in results.values() if "clock" in data}
    versions = ", ".join(f"{name} {value}" for name, value in about.items() if name not in ("gpu", "date"))
    sections.append(
        f"Measured on {about['gpu']} at {about['date']}; {versions}. Time by {', '.join(sorted(clocks))}; launches and the "
        "language model by the host's clock. A ratio is to the goal's base."
    )
    return "\n\n".join(sections)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="the most important cases, fewer rounds; only --out is written"
    )
    parser.add_argument(
        "--no-gpu", action="store_true", help="every path once, tiny, on the CPU; only --out is written"
    )
    parser.add_argument("--no-torch", action="store_true", help="without PyTorch as a peer")
    parser.add_argument("--tiles", action="store_true", help="compare other tiles for attention too")
    parser.add_argument(
        "--only", choices=list(PARTS), action="append", help="this part, and others so named; only --out is written"
    )
    parser.add_argument(
        "--seconds", type=float, help="for all parts, the first of which that fit run (default: enough)"
    )
    parser.add_argument("--out", type=pathlib.Path, help="a folder for the results, beside benchmarks/results")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--to", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part is not None:
        measure(options.part, options, options.to)
        return 0
    wanted = options.only or [part for part in PARTS if part != "tiles" or options.tiles]
    enough = sum(PARTS[part][1] + _START_AND_END for part in wanted)
    ends = time.monotonic() + (enough if options.seconds is None else options.seconds)
    # What is named has to run, and tiny cases take less.
    may_shrink = bool(options.only or options.quick or options.no_gpu)
    results: dict[str, Any] = {}
    waiting = list(wanted)
    with tempfile.TemporaryDirectory() as folder:
        while (chosen := next_part(waiting, ends - time.monotonic(), may_shrink=may_shrink)) is not None:
            part, seconds = chosen
            waiting.remove(part)
            print(f"== {part}, {seconds:.0f} s", flush=True)
            results[part] = measured(part, seconds, options, pathlib.Path(folder))
            if "error" in results[part]:
                print(f"{part} is not finished: {results[part]['error']}", flush=True)
            _write(results, options)
    for part in waiting:
        why = f"out of time: it needs {PARTS[part][1] + _START_AND_END:.0f} s; run `--only {part}`"
        print(f"{part} is left out, {why}", flush=True)
        results[part] = {"rows": [], "error": why}
    _write({part: results[part] for part in wanted}, options, is_whole=not waiting)
    return 1 if any(not data.get("error", "out of time").startswith("out of time") for data in results.values()) else 0


def _write(results: Mapping[str, Any], options: argparse.Namespace, *, is_whole: bool = False) -> None:
    about = {**_report.machine(), **device()}
    text = markdown(results, about)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu.json").write_text(json.dumps({"machine": about, "parts": results}, indent=1) + "\n")
        (options.out / "gpu.md").write_text(text + "\n")
    # Only a whole run on a GPU is worth keeping.
    measured_some = any(data["rows"] for data in results.values())
    if is_whole and measured_some and not (options.no_gpu or options.quick or options.only):
        stored = {part: {**data, "rows": [kept(row) for row in data["rows"]]} for part, data in results.items()}
        _report.write("gpu", text, {"gpu": about, "parts": stored})
        _report.put(PAGE, "gpu", text)


if __name__ == "__main__":
    sys.exit(main())
