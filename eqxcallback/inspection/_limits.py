"""Measure what the machine can do at most: how fast its processors read memory, and how fast they multiply and add."""

import concurrent.futures
import functools
import os
import time
from collections.abc import Callable

import numpy as np

from .. import _ext
from ._profile import Limits


_READ_BYTES = 1 << 28  # more than caches hold
_STEPS = 1 << 18  # a few milliseconds
_ROUNDS = 20


@functools.cache
def limits() -> Limits:
    """Measure once in a process, with as many threads as XLA has. The best of several rounds: others may use the machine too."""
    threads, memory = _processors(), np.ones(_READ_BYTES // 8, np.uint64)
    slices = np.array_split(memory, threads)
    operations = threads * _ext.multiply_adds(_STEPS)
    reads, multiplies = [], []
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            reads.append(_elapsed(lambda: list(pool.map(np.bitwise_or.reduce, slices))))
            multiplies.append(_elapsed(lambda: list(pool.map(_ext.multiply_adds, [_STEPS] * threads))))
    return Limits(threads, _READ_BYTES / min(reads), operations / min(multiplies))


def _processors() -> int:
    """Count the processors that this process may use: XLA has a thread for each."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _elapsed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
