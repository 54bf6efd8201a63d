"""Tokens per second of SmolLM2-135M-Instruct, ours against llama.cpp and plain JAX: `python -m benchmarks.generate`.

All contestants have the same file and threads, and take turns in one process for each number of threads; the memory of each
is measured in a process of its own. llama.cpp is the package llama-cpp-python, which takes ten minutes to build: it is in the
dependency group `bench-generate`.
"""

import argparse
import collections
import importlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from . import _memory, _report, _summary
from ._json import dumps
from ._process import keeping_modules, run_on
from ._rows import OURS, Goal, goals_text


_PROMPT = 512
_SHORT, _LONG = 64, 512  # tokens in the cache when decoding starts
_STEPS = 16
_ROOM = 1024
_PEER = "llama.cpp"
# How many times as fast as the peer, on so many threads.
_PROMPT_GOAL, _DECODE_GOALS = 3.0, {"1": 1.6, "2": 1.5}
_START, _START_GOAL = "a second start beside JAX's import, s", 1.0


class Contestant(Protocol):
    """One implementation. Both methods block until the work is done."""

    def prompt(self, tokens: np.ndarray) -> None:
        """Take a whole prompt; the cache holds nothing else afterwards."""

    def decode(self, count: int) -> None:
        """Generate so many tokens, one after the other, from an arbitrary one."""


class Ours(Contestant):
    def __init__(self, dtype: str, cache_dtype: str | None = None):
        import jax
        import jax.numpy as jnp

        from models import gguf, llama

        model = llama.load(gguf.open_model(gguf.default_path()), dtype=dtype, cache_dtype=cache_dtype, packed=True)
        self._weights, tree = jax.tree.flatten(model)
        self._new_cache: Callable[[], Any] = lambda: model.init_cache(_ROOM)

        def step(weights: Any, tokens: Any, cache: Any) -> Any:
            model = jax.tree.unflatten(tree, weights)
            x, cache = model(tokens, cache)
            return jnp.argmax(model.logits(x[-1:]), -1).astype(jnp.int32), cache

        self._step = jax.jit(step, donate_argnums=2)

    def prompt(self, tokens: np.ndarray) -> None:
        self._token, self._cache = self._step(self._weights, tokens, self._new_cache())
        np.asarray(self._token)

    def decode(self, count: int) -> None:
        for _ in range(count):
            self._token, self._cache = self._step(self._weights, self._token, self._cache)
            np.asarray(self._token)


class PlainJax(Contestant):
    def __init__(self):
        import jax
        import jax.numpy as jnp

        from models import gguf

        from . import plain_llama

        path = gguf.default_path()
        config, self._params = gguf.open_model(path).config, plain_llama.load(path)

        def prompt(params: Any, tokens: Any) -> Any:
            scores, cache = plain_llama.prefill(params, config, tokens, _ROOM)
            return jnp.argmax(scores).astype(jnp.int32), cache

        def step(params: Any, token: Any, position: Any, cache: Any) -> Any:
            scores, cache = plain_llama.decode_step(params, config, token, position, cache)
            return jnp.argmax(scores).astype(jnp.int32), cache

        self._prompt, self._step = jax.jit(prompt), jax.jit(step, donate_argnums=3)

    def prompt(self, tokens: np.ndarray) -> None:
        self._token, self._cache = self._prompt(self._params, tokens)
        self._length = len(tokens)
        int(self._token)

    def decode(self, count: int) -> None:
        for _ in range(count):
            self._token, self._cache = self._step(self._params, self._token, np.int32(self._length), self._cache)
            self._length += 1
            int(self._token)


class LlamaCpp(Contestant):
    def __init__(self, threads: int):
        from models import gguf

        llama_cpp: Any = importlib.import_module("llama_cpp")  # which type checkers need not find
        self._model = llama_cpp.Llama(
            str(gguf.default_path()),
            n_threads=threads,
            n_threads_batch=threads,
            n_ctx=_ROOM,
            n_batch=_PROMPT,
            verbose=False,
        )

    def prompt(self, tokens: np.ndarray) -> None:
        self._model.reset()
        self._model.eval(tokens.tolist())

    def decode(self, count: int) -> None:
        for _ in range(count):
            self._model.eval([self._likeliest()])

    def _likeliest(self) -> int:
        scores = self._model._ctx.get_logits()
        return int(np.ctypeslib.as_array(scores, (self._model.n_vocab(),)).argmax())


CONTESTANTS: dict[str, Callable[[int], Contestant]] = {
    "eqxcallback, f32": lambda threads: Ours("float32"),
    "eqxcallback, f32, cache in f16": lambda threads: Ours("float32", "float16"),  # which is llama.cpp's default
    "eqxcallback, bf16": lambda threads: Ours("bfloat16"),
    _PEER: LlamaCpp,
    "plain JAX, f32 weights": lambda threads: PlainJax(),
}


def _tokens(count: int) -> np.ndarray:
    return (np.arange(count) * 7 % 40_000 + 100).astype(np.int32)


def measure(threads: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of each contestant: the median over the rounds, and the quartiles."""
    contestants = {name: make(threads) for name, make in CONTESTANTS.items()}
    speeds = collections.defaultdict(lambda: collections.defaultdict(list))
    memory = np.ones(64 << 20, np.uint64)

    def record(name: str, what: str, count: float, run: Callable[..., object], *args: Any) -> None:
        start = time.perf_counter()
        run(*args)
        speeds[name][what].append(count / (time.perf_counter() - start))

    for i in range(rounds + 1):
        if i == 1:
            speeds.clear()  # the first round warmed up
        for length, what in ((_SHORT, "decode at 64"), (_LONG, "decode at 512")):
            for name, contestant in contestants.items() if i % 2 else reversed(contestants.items()):
                if length == _PROMPT:
                    record(name, "prompt of 512", length, contestant.prompt, _tokens(length))
                else:
                    contestant.prompt(_tokens(length))
                record(name, what, _STEPS, contestant.decode, _STEPS)
        record("probe: memory read, GB/s", "probe", memory.nbytes / 1e9, np.bitwise_or.reduce, memory)
    return {
        name: {what: np.percentile(values, [25, 50, 75]).tolist() for what, values in columns.items()}
        for name, columns in speeds.items()
    }


def peak_memory(name: str) -> int:
    """Bytes that this process has had in memory, with one contestant in it that has generated 32 tokens."""
    contestant = CONTESTANTS[name](os.cpu_count() or 1)
    contestant.prompt(_tokens(_SHORT))
    contestant.decode(32)
    return _memory.peak()


def second_start(cores: set[int], runs: int = 7) -> dict[str, float]:
    """Median seconds until `models.generate` writes its first byte, with its programs in a cache, and until JAX is imported."""
    commands = {
        "first byte": [sys.executable, "-m", "models.generate", "Say hello.", "--max-tokens", "1"],
        "JAX": [sys.executable, "-c", "import jax; jax.devices(); print(flush=True)"],
    }
    seconds = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, **keeping_modules(os.path.join(cache, "modules")), "XDG_CACHE_HOME": cache}
        for _ in range(1 + runs):
            for name, command in commands.items():
                seconds[name].append(_until_first_byte(command, cores, environment))
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def _until_first_byte(command: list[str], cores: set[int], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    ) as process:
        assert process.stdout is not None
        is_there = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if not is_there or process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return seconds


def goals(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the goals for `python -m benchmarks --check`: of the slowest of ours, in each column, and of a second start."""
    rows = []
    for count, speeds in data["threads"].items():
        for what in speeds[_PEER]:
            least = _PROMPT_GOAL if what.startswith("prompt") else _DECODE_GOALS[count]
            slowest = min(columns[what][1] for name, columns in speeds.items() if name.startswith(OURS))
            goal = Goal(_PEER, least).as_data({OURS: slowest, _PEER: speeds[_PEER][what][1]}, "tokens/s")
            rows.append({"case": f"{what}, {count} thread{'s' * (count != '1')}", "goals": [goal]})
    beside = data["start"]["first byte"] - data["start"]["JAX"]
    return [*rows, {"case": _START, "goals": [Goal(_START_GOAL).as_data({OURS: beside}, "s")]}]


def _in_own_process(cores: set[int], *arguments: str) -> Any:
    return json.loads(run_on(cores, [sys.executable, "-m", "benchmarks.generate", *arguments]))


def markdown(data: Mapping[str, Any]) -> str:
    threads, start = data["threads"], data["start"]
    columns = [
        f"{what}, {n} thread{'s' * (n != '1')}" for n in threads for what in ("prompt", "decode at 64", "at 512")
    ]
    table = _report.table(["tokens per second (of llama.cpp)", *columns, "peak MB"], list(_rows(data)))
    return "\n\n".join(
        [
            table,
            f"A second start writes its first byte after {start['first byte']:.2f} s, of which importing JAX takes "
            f"{start['JAX']:.2f}: {start['first byte'] - start['JAX']:.2f} s beside it.",
            _goals_text(data),
            _report.measured_on(data["machine"]),
        ]
    )


def _goals_text(data: Mapping[str, Any]) -> str:
    decode = " and ".join(
        f"{least:g} on {count} thread{'s' * (count != '1')}" for count, least in _DECODE_GOALS.items()
    )
    text = f"Goals: prompts have {_PROMPT_GOAL:g} times the speed of {_PEER}, decoding {decode}; "
    text += f"and a second start takes at most {_START_GOAL:g} s beside JAX's import. The slowest row of ours counts. "
    missed = [f"{row['case']}: {goals_text([goal])}" for row in goals(data) for goal in row["goals"] if not goal["met"]]
    return text + (f"Not met: {'; '.join(missed)}." if missed else "All are met.")


def _rows(data: Mapping[str, Any]) -> Iterator[list[str]]:
    results = data["threads"].values()
    for name in CONTESTANTS:
        row = [name]
        for result in results:
            for what in ("prompt of 512", "decode at 64", "decode at 512"):
                ours, peer = result[name][what][1], result[_PEER][what][1]
                row.append(f"{ours:.0f} ({ours / peer:.2f})")
        yield [*row, f"{data['peak_memory'][name] / 1e6:.0f}"]
    probes = (f"{result['probe: memory read, GB/s']['probe'][1]:.0f}" for result in results)
    yield ["probe: memory read, GB/s", *(cell for probe in probes for cell in (probe, "", "")), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--readme", action="store_true", help="write the table into the documentation")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=_report.RESULTS,
        metavar="DIR",
        help="a folder for the results (default: benchmarks/results)",
    )
    parser.add_argument("--measure", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    parser.add_argument("--memory", choices=list(CONTESTANTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure, options.rounds)))
        return
    if options.memory is not None:
        print(json.dumps(peak_memory(options.memory)))
        return
    cores = sorted(os.sched_getaffinity(0))
    counts = [count for count in (1, 2) if count <= len(cores)]
    rounds = ("--rounds", str(options.rounds))
    results = {n: _in_own_process(set(cores[:n]), "--measure", str(n), *rounds) for n in counts}
    memory = {name: _in_own_process(set(cores), "--memory", name) for name in CONTESTANTS}
    data = {
        "machine": _report.machine(),
        "threads": {str(n): result for n, result in results.items()},
        "peak_memory": memory,
        "start": second_start(set(cores)),
    }
    data = json.loads(dumps(data))  # as it is kept, so that both say the same
    data["rows"] = goals(data)
    text = markdown(data)
    print(text)
    _report.write("generate", text, data, folder=options.out)
    if options.readme:
        _report.put(_report.PAGE, "generate", text)
        _summary.publish(_report.RESULTS)


if __name__ == "__main__":
    main()
