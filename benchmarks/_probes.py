"""Probe the machine while a row is measured: contestants that compute nothing of interest, as fast as it goes."""

import ctypes
import functools

import numpy as np

from ._native import load
from ._rows import Setting
from ._timing import Runner, probe


FMA, READ, COPY = "probe: FMA", "probe: memory read", "probe: copy"
# Of pairs of bf16, and of fours of int8.
PAIRS, BYTES = "probe: bf16", "probe: int8"
_KINDS = {FMA: 0, PAIRS: 1, BYTES: 2}
_OPTIONS = ("-O3", "-march=native", "-ffp-contract=fast", "-pthread")
# Several times as large as the caches.
_READ_BYTES = 256 << 20


def multiply_runner(setting: Setting, name: str = FMA) -> Runner:
    """Multiply-adds on all threads."""
    return probe(lambda: _multiply(setting, name))


def multiply_operations(setting: Setting, name: str = FMA) -> float:
    """Return the operations of one call: 0 if the processor has no instructions for them."""
    return _multiply(setting, name)


def _multiply(setting: Setting, name: str) -> float:
    function = load("probes.cc", *_OPTIONS).multiply_probe
    function.restype = ctypes.c_double
    return function(_KINDS[name], setting.threads, ctypes.c_long(100 if setting.tiny else 400_000))


def read_runner(setting: Setting) -> Runner:
    """Reads a large array once, on all threads."""
    library, data = load("probes.cc", *_OPTIONS), _data(read_bytes(setting))
    out = np.zeros(setting.threads, np.uint64)
    addresses = [array.ctypes.data_as(ctypes.c_void_p) for array in (data, out)]
    size = ctypes.c_size_t(data.nbytes)
    return probe(lambda: library.read_probe(setting.threads, addresses[0], size, addresses[1]) if out.size else None)


def read_bytes(setting: Setting) -> float:
    """Return the bytes that one call reads."""
    return float(1 << 16 if setting.tiny else _READ_BYTES)


def copy_runner(setting: Setting, size: int) -> Runner:
    """Copies so many bytes on all threads, as often as makes starting them cheap: in the caches if they have room for both."""
    library = load("probes.cc", *_OPTIONS)
    source, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    addresses = [array.ctypes.data_as(ctypes.c_void_p) for array in (source, target)]
    times = _copies(setting, size)
    return probe(lambda: library.copy_probe(setting.threads, *addresses, ctypes.c_size_t(target.size), times))


def copied_bytes(setting: Setting, size: int) -> float:
    """Return the bytes that one call reads and writes."""
    return 2.0 * size * _copies(setting, size)


def _copies(setting: Setting, size: int) -> int:
    return 1 if setting.tiny else max(1, _READ_BYTES // (4 * size))


@functools.cache
def _data(size: float) -> np.ndarray:
    return np.ones(int(size) // 8, np.uint64)
