"""Interleaved timing: every contestant in every round, so that a slow moment of the machine hits all of them."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds for one call: the median over the rounds, and the quartiles."""

    median: float
    low: float
    high: float


def interleaved(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int, round_seconds: float
) -> dict[str, Timing]:
    """Time each contestant `rounds` times, in turns, each turn for about `round_seconds`.

    A contestant blocks until its work is done. A first pass, which is thrown away, warms up and finds the repetitions.
    """
    repetitions = {}
    for name, run in contestants.items():
        run()
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < round_seconds:
            run()
            count += 1
        repetitions[name] = count
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            count = repetitions[name]
            start = time.perf_counter()
            for _ in range(count):
                run()
            times[name].append((time.perf_counter() - start) / count)
    result = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        result[name] = Timing(median, low, high)
    return result
