"""Measure the memory that this process has, and the most that it had."""

import ctypes
import pathlib
from collections.abc import Callable


_SELF = pathlib.Path("/proc/self")
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> None:
    """Tell glibc not to give freed memory back to the system. By default it does from 32 MiB on, and each result then costs
    a page fault for each 4 KiB, which is far more than the copy. For the rest of the process, and before it has other threads:
    they would have memory of their own, which glibc gives back all the same where a result is larger than 64 MiB."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_ARENA_MAX, 1)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def peak() -> int:
    """The most bytes that the process has had in memory."""
    return _status("VmHWM")


def peak_of(call: Callable[[], object]) -> int | None:
    """Return how many bytes a call, its results included, adds to the process for a time. `None` if Linux does not say."""
    try:
        _give_freed_memory_back()
        (_SELF / "clear_refs").write_text("5")  # the peak begins anew
        before = _status("VmRSS")
        call()
        return max(0, peak() - before)
    except OSError:
        return None


def _give_freed_memory_back() -> None:
    ctypes.CDLL(None).malloc_trim(0)


def _status(key: str) -> int:
    status = dict(line.split(":", 1) for line in (_SELF / "status").read_text().splitlines())
    return int(status[key].split()[0]) * 1024
