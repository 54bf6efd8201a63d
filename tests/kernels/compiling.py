"""Kernels compiled for GPUs that need not be there, and what the compiler says about them."""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Sequence

from eqxcallback.backends import _cuda, _nvrtc, _source


@dataclasses.dataclass(frozen=True)
class Usage:
    """The resources that one kernel uses."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


@functools.cache
def unavailable() -> str | None:
    """Why nothing can be compiled here."""
    try:
        _nvrtc.find()
    except ImportError as error:
        return str(error)
    return None


def ptx(source: pathlib.Path, *entries: str, arch: str = "compute_80") -> str:
    nvrtc = _nvrtc.find()
    text, name = _source.read_source(source, "compiling")
    options = [f"--gpu-architecture={arch}", *_cuda.FLAGS, *_nvrtc.include_options(nvrtc.version[0])]
    image, _, _ = nvrtc.compile(text, name, options, entries, False)
    return image.decode()


_usages: dict[tuple[object, ...], Usage] = {}


def compiled(source: pathlib.Path, entries: Sequence[str], arch: str) -> dict[str, Usage]:
    """Return what each of `entries` uses, compiled for `arch`, such as `"sm_90"`, once in a process. Raises an error with the
    compiler's log."""
    which = source, arch, _nvrtc.find().version
    missing = [entry for entry in entries if (*which, entry) not in _usages]
    for entry, usage in _compiled(source, missing, arch).items() if missing else ():
        _usages[*which, entry] = usage
    return {entry: _usages[*which, entry] for entry in entries}


def _compiled(source: pathlib.Path, entries: Sequence[str], arch: str) -> dict[str, Usage]:
    nvrtc = _nvrtc.find()
    text, name = _source.read_source(source, "compiling")
    options = [
        f"--gpu-architecture={arch}",
        *_cuda.FLAGS,
        "--ptxas-options=-v",
        *_nvrtc.include_options(nvrtc.version[0]),
    ]
    _, symbols, log = nvrtc.compile(text, name, options, list(entries), True)
    usages = {}
    for part in log.split("Compiling entry function '")[1:]:
        registers, spilled = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes spill stores", part)
        assert registers, part
        assert spilled, part
        shared = re.search(r"(\d+) bytes smem", part)
        usages[part.split("'", 1)[0]] = Usage(int(registers[1]), int(spilled[1]), int(shared[1]) if shared else 0)
    return {entry: usages[symbol] for entry, symbol in zip(entries, symbols, strict=True)}
