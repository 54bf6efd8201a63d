"""Speed of `models.serve` beside llama-cpp-python's server: `python -m benchmarks.serve`.

Both serve the same file with two threads, and take turns. Each client streams a greedy answer of 64 tokens after a prompt of
about 40. Prompts differ from round to round: nobody has more of them in a cache than the system message. llama-cpp-python takes
ten minutes to build: it is in the dependency group `bench-generate`. Where it does not run, the table says why.
"""

import argparse
import collections
import contextlib
import importlib.metadata
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from models import gguf

from . import _probes, _report
from ._json import dumps
from ._rows import OURS, Setting
from ._servers import HOST, DidNotStart, Server, ask_together, free_port, serving
from ._timing import HostClock


PAGE = _report.ROOT / "docs" / "serve.md"
_PEER = "llama-cpp-python"
_THREADS = 2
_CLIENTS, _TOKENS = (1, 4, 8), 64
_CONTEXT = "2048"
_SPEED, _FIRST = "tokens per second", "seconds to the first token"
_DIGITS = {_SPEED: 0, _FIRST: 2}  # in the table


def commands(weights: pathlib.Path | None, rows: int, port: int) -> dict[str, list[str]]:
    """Return what starts each server at a port, with so many answers at a time if it makes several."""
    ours = ["models.serve", "--port", str(port), "--rows", str(rows), "--context", _CONTEXT, "--no-embeddings"]
    path = gguf.default_path() if weights is None else weights
    theirs = ["llama_cpp.server", "--model", str(path), "--host", HOST, "--port", str(port), "--n_ctx", _CONTEXT]
    theirs += ["--n_threads", str(_THREADS), "--n_threads_batch", str(_THREADS), "--verbose", "false"]
    # By default a new request ends the answer before it.
    theirs += ["--interrupt_requests", "false"]
    given = [] if weights is None else ["--weights", str(weights)]
    return {OURS: [sys.executable, "-m", *ours, *given], _PEER: [sys.executable, "-m", *theirs]}


def measure(weights: pathlib.Path | None, rounds: int, *, tiny: bool = False) -> dict[str, Any]:
    """Return for each number of clients what each server does: the median over the rounds, and the quartiles."""
    clients, tokens = ((1, 2), 4) if tiny else (_CLIENTS, _TOKENS)
    cores = set(sorted(os.sched_getaffinity(0))[:_THREADS])
    servers: dict[str, Server] = {}
    missing: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for name in (OURS, _PEER):
            port = free_port()
            try:
                command = commands(weights, max(clients), port)[name]
                servers[name] = stack.enter_context(serving(command, port, cores))
            except DidNotStart as error:
                if name == OURS:
                    raise
                missing[name] = str(error)
        speeds = _race(servers, clients, tokens, rounds, Setting(HostClock(), threads=_THREADS, tiny=tiny))
    version = None if missing else importlib.metadata.version(_PEER)
    return {"tokens": tokens, "rounds": rounds, "version": version, "missing": missing, **speeds}


def _race(
    servers: Mapping[str, Server], clients: Sequence[int], tokens: int, rounds: int, setting: Setting
) -> dict[str, Any]:
    figures = collections.defaultdict(lambda: collections.defaultdict(lambda: collections.defaultdict(list)))
    probe, read = _probes.read_runner(setting), []
    prompt = 1000
    for i in range(rounds + 1):
        if i == 1:
            figures.clear()  # the first round warmed up
            read.clear()
        for count in clients:
            prompts = [f"Write a long story about house number {prompt + 17 * client}." for client in range(count)]
            prompt += 17 * count
            for name, server in servers.items():
                answers = ask_together(server, prompts, tokens)
                seconds = max(answer.end for answer in answers) - min(answer.start for answer in answers)
                figures[count][name][_SPEED].append(count * tokens / seconds)
                figures[count][name][_FIRST].append(
                    statistics.median(answer.first - answer.start for answer in answers)
                )
        read.append(_probes.read_bytes(setting) / 1e9 / probe.run(1))
    return {
        "clients": {
            str(count): {
                name: {what: _quartiles(values) for what, values in columns.items()} for name, columns in row.items()
            }
            for count, row in figures.items()
        },
        _probes.READ: _quartiles(read),
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    return np.percentile(values, [25, 50, 75]).tolist()


def markdown(data: Mapping[str, Any]) -> str:
    peer = _PEER if data["version"] is None else f"{_PEER} {data['version']}"
    header = [f"{what}: {name}" for what in _DIGITS for name in (OURS, peer)]
    lines = []
    for count, row in data["clients"].items():
        cells = [
            _shown(row[name][what], digits) if name in row else ""
            for what, digits in _DIGITS.items()
            for name in (OURS, _PEER)
        ]
        ratio = f"{row[OURS][_SPEED][1] / row[_PEER][_SPEED][1]:.2f}" if _PEER in row else ""
        lines.append([count, *cells, ratio])
    about = f"Medians of {data['rounds']} rounds, and their quartiles. "
    about += f"Memory is read, in the same rounds, at {_shown(data[_probes.READ], 0)} GB/s."
    why = [f"{name} was not measured: {reason}" for name, reason in data["missing"].items()]
    table = _report.table(["clients", *header, "times as many tokens"], lines)
    return "\n\n".join([table, about, *why, _report.measured_on(data["machine"])])


def _shown(quartiles: Sequence[float], digits: int) -> str:
    low, median, high = (f"{value:.{digits}f}" for value in quartiles)
    return f"{median} ({low} to {high})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--readme", action="store_true", help="write the table into the documentation")
    parser.add_argument("--tiny", action="store_true", help="every path once, tiny; written only with --out")
    parser.add_argument(
        "--weights", type=pathlib.Path, metavar="GGUF", help="another model (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="DIR", help="a folder for the results (default: benchmarks/results)"
    )
    options = parser.parse_args(arguments)
    if options.readme and (options.tiny or options.weights is not None):
        parser.error("--readme needs a full run, of the default model")
    if options.rounds < 1:
        parser.error(f"expected --rounds of 1 or more; got {options.rounds}")
    results = measure(options.weights, options.rounds, tiny=options.tiny)
    data = json.loads(dumps({"machine": _report.machine(), **results}))  # as it is kept, so that both say the same
    text = markdown(data)
    print(text)
    if options.out is not None or not options.tiny:
        _report.write("serve", text, data, folder=options.out or _report.RESULTS)
    if options.readme:
        _report.put(PAGE, "serve", text)


if __name__ == "__main__":
    main()
