"""What the machine can do while a row is measured: contestants that compute nothing of interest, as fast as it goes."""

import ctypes
import functools

import numpy as np

from ._native import load
from ._rows import Setting
from ._timing import Runner, probe


FMA, READ = "probe: FMA", "probe: memory read"
_OPTIONS = ("-O3", "-march=native", "-ffp-contract=fast", "-pthread")
# Several times as large as the caches.
_READ_BYTES = 256 << 20


def fma_runner(setting: Setting) -> Runner:
    """Multiply-adds in f32, on all threads."""
    library, sums = load("probes.cc", *_OPTIONS), np.zeros(setting.threads, np.float32)
    steps, address = ctypes.c_long(_steps(setting)), sums.ctypes.data_as(ctypes.c_void_p)
    # What it was called with lives as long as the runner.
    return probe(lambda: library.fma_probe(setting.threads, steps, address) if sums.size else None)


def fma_operations(setting: Setting) -> float:
    """Of one call."""
    function = load("probes.cc", *_OPTIONS).fma_operations
    function.restype = ctypes.c_double
    return function(setting.threads, ctypes.c_long(_steps(setting)))


def _steps(setting: Setting) -> int:
    return 100 if setting.tiny else 20_000


def read_runner(setting: Setting) -> Runner:
    """Reads a large array once, on all threads."""
    library, data = load("probes.cc", *_OPTIONS), _data(read_bytes(setting))
    out = np.zeros(setting.threads, np.uint64)
    addresses = [array.ctypes.data_as(ctypes.c_void_p) for array in (data, out)]
    size = ctypes.c_size_t(data.nbytes)
    return probe(lambda: library.read_probe(setting.threads, addresses[0], size, addresses[1]) if out.size else None)


def read_bytes(setting: Setting) -> float:
    """Of one call."""
    return float(1 << 16 if setting.tiny else _READ_BYTES)


@functools.cache
def _data(size: float) -> np.ndarray:
    return np.ones(int(size) // 8, np.uint64)
