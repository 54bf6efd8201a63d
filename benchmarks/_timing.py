"""Peers take turns: every contestant in every round, so that a slow moment of the machine hits all of them.

A contestant is a `Runner`; a `Race` is what came of them. A second pass goes through them in the opposite order, so that what one
of them leaves in the caches does not always meet the same successor.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from ._memory import peak_of


class Timing(NamedTuple):
    """Seconds for one call: the median over the rounds, and the quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Timing":
        low, median, high = statistics.quantiles(values, n=4)
        return cls(median, low, high)


class Runner(NamedTuple):
    """One contestant, compiled.

    **Attributes:**

    - `run`: `run(count)` is the seconds of so many calls.
    - `result`: what one of them returns; `None` if that is nothing to compare: a probe.
    - `temporary`: bytes that XLA keeps beside operands and results while it runs.
    """

    run: Callable[[int], float]
    result: Callable[[], Any] | None
    temporary: Callable[[], int | None] | None = None


def waited_for(call: Callable[[], Any]) -> Runner:
    """Make a runner of a call that blocks until its work is done."""

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - start

    return Runner(run, call)


def waited_for_on(make: Callable[[Sequence[Any]], Callable[[], Any]], args: Sequence[Any]) -> Runner:
    """The same of the call that `make` returns of operands."""
    return waited_for(make(args))


def probe(call: Callable[[], Any]) -> Runner:
    """Make a runner of such a call whose result is not compared."""
    return waited_for(call)._replace(result=None)


def planned_memory(jitted: Any, *args: Any) -> int | None:
    """Bytes that XLA keeps beside operands and results while it runs a compiled function."""
    analysis = jitted.lower(*args).compile().memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes


class Clock(Protocol):
    name: str

    def runner(self, f: Callable[..., Any], *args: Any, **jit_options: Any) -> Runner: ...


class HostClock:
    """Calls that follow each other, from the first to when the last is done."""

    name = "host"

    def runner(self, f: Callable[..., Any], *args: Any, **jit_options: Any) -> Runner:
        jitted = jax.jit(f, **jit_options)

        def run(count: int) -> float:
            out = None
            start = time.perf_counter()
            for _ in range(count):
                out = jitted(*args)
            jax.block_until_ready(out)
            return time.perf_counter() - start

        return Runner(run, lambda: jitted(*args), functools.partial(planned_memory, jitted, *args))


class WaitingClock:
    """Calls of which each is waited for: on CPUs two would else run side by side. Arrays are arguments, never constants, so that
    nothing is computed when the program is compiled."""

    name = "host, each call waited for"

    def runner(self, f: Callable[..., Any], *args: Any, **jit_options: Any) -> Runner:
        jitted = jax.jit(f, **jit_options)
        temporary = functools.partial(planned_memory, jitted, *args)
        return waited_for(lambda: jax.block_until_ready(jitted(*args)))._replace(temporary=temporary)


class Memory(NamedTuple):
    """Bytes beside operands and results: what XLA planned, and by how much one call made the process larger."""

    temporary: int | None
    peak: int | None


@dataclasses.dataclass
class Race:
    """**Attributes:**

    - `seconds`: of one call of each contestant that could run.
    - `failed`: why the others could not.
    - `differences`: of results, from those of the first contestant, relative to the largest. Infinite for other shapes.
    - `memory`: of one call.
    - `passes`: the medians of each pass.
    - `tried`: seconds of those that were tried once and are much slower than another one of their family.
    """

    seconds: dict[str, Timing]
    failed: dict[str, str]
    differences: dict[str, float]
    memory: dict[str, Memory] = dataclasses.field(default_factory=dict)
    passes: list[dict[str, float]] = dataclasses.field(default_factory=list)
    tried: dict[str, float] = dataclasses.field(default_factory=dict)
    _next_pass: Callable[[], None] | None = None

    def again(self) -> None:
        """One more pass, in the opposite order."""
        if self._next_pass is not None:
            self._next_pass()


def race(
    contestants: Mapping[str, Callable[[], Runner]],
    *,
    rounds: int,
    round_seconds: float,
    most_calls: int = 500,
    memory: bool = False,
    best_only: bool = False,
) -> Race:
    """Time each contestant in turns, each turn for about `round_seconds`. One that cannot be made or run is left out, and says
    why. With `best_only`, so is one that takes far longer than another one of its family."""
    runners, once, failed, differences = {}, {}, {}, {}
    first = None
    for name, make in contestants.items():
        try:
            runner = make()
            result = None if runner.result is None else samples(runner.result())
            runner.run(1)
            once[name] = runner.run(1)
            if once[name] < min(0.2, 4 * round_seconds):
                # The least: where the system maps memory anew a call may take 20 times as long, and turns of one call each would
                # compare what others have left in the caches.
                once[name] = min(once[name], *(runner.run(1) for _ in range(3)))
        except Exception as error:  # a peer that is not there must not cost the others
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        if result is not None:
            differences |= {} if first is None else {name: difference(first, result)}
            first = result if first is None else first
        runners[name] = runner
    tried = _far_behind(once) if best_only else {}
    runners = {name: runner for name, runner in runners.items() if name not in tried}
    counts = {name: max(1, min(most_calls, round(round_seconds / max(once[name], 1e-7)))) for name in runners}
    if sum(once[name] * counts[name] for name in runners) > 2.0:  # seconds: a round of these says more
        rounds = min(rounds, 3)
    used = {name: _memory_of(runner) for name, runner in runners.items()} if memory else {}
    measured = Race({}, failed, differences, used, tried=tried)
    times: dict[str, list[float]] = {name: [] for name in runners}

    def next_pass() -> None:
        of_pass: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(rounds):
            for name in runners if not measured.passes else reversed(runners):
                _wait_until_idle()
                of_pass[name].append(runners[name].run(counts[name]) / counts[name])
        for name, values in of_pass.items():
            times[name] += values
            measured.seconds[name] = Timing.of(times[name])
        measured.passes.append({name: statistics.median(values) for name, values in of_pass.items()})

    if rounds:
        measured._next_pass = next_pass
        next_pass()
    return measured


def _wait_until_idle() -> None:
    """Wait until no thread of this process runs: those of onnxruntime poll for 40 ms after a call, those of PyTorch for 10, and
    would take a core from whoever's turn is next."""
    for _ in range(100):
        before = time.process_time()
        time.sleep(0.005)
        if time.process_time() - before < 0.001:
            return


def family(name: str) -> str:
    """`"XLA"` of `"XLA: einsum"`, which is one way to have XLA do it."""
    return name.split(": ")[0]


def _far_behind(seconds: Mapping[str, float]) -> dict[str, float]:
    best: dict[str, float] = {}
    for name, taken in seconds.items():
        best[family(name)] = min(taken, best.get(family(name), taken))
    return {name: taken for name, taken in seconds.items() if taken > 1.5 * best[family(name)]}


def _memory_of(runner: Runner) -> Memory:
    temporary = None if runner.temporary is None else runner.temporary()
    results = 0 if runner.result is None else sum(leaf.nbytes for leaf in jax.tree.leaves(runner.result()))
    if jax.default_backend() != "cpu":  # whose memory is not that of the process: all of it is in XLA's plan
        return Memory(temporary, temporary)
    peak = peak_of(lambda: runner.run(1))
    return Memory(temporary, None if peak is None else max(0, peak - results))


def samples(result: Any) -> list[np.ndarray]:
    """Some elements of each array, by which contestants are compared. Arrays may be of JAX or of PyTorch."""
    return [_sample(leaf) for leaf in jax.tree.leaves(result)]


def _sample(leaf: Any) -> np.ndarray:
    array = leaf.detach().float().cpu().numpy() if hasattr(leaf, "detach") else np.asarray(leaf, np.float32)
    flat = array.ravel()
    step = max(1, flat.size // 65_536)
    # Odd, so that it does not stay in one column.
    return flat[:: step + (step > 1 and step % 2 == 0)]


def difference(first: list[np.ndarray], other: list[np.ndarray]) -> float:
    """The largest of all arrays. NaN is one from everything."""
    if [x.shape for x in first] != [x.shape for x in other]:
        return float("inf")
    differences = [0.0]
    for a, b in zip(first, other, strict=True):
        if a.size:
            differences.append(float(np.abs(b - a).max() / max(np.abs(a).max(), 1e-30)))
    return float(np.max(differences))  # NaN if one of them is


def interleaved(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int, round_seconds: float
) -> dict[str, Timing]:
    """A race of calls that block until their work is done, and all of which have to run."""
    result = race(
        {name: functools.partial(probe, run) for name, run in contestants.items()},
        rounds=rounds,
        round_seconds=round_seconds,
        most_calls=100_000,
    )
    if result.failed:
        raise RuntimeError(f"contestants that did not run: {result.failed}")
    return result.seconds
