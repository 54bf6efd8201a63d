"""A compiler that does not end for some first argument, and waits for a process of its own."""

import pathlib
import time

import pytest

from eqxcallback.core import _compilers


SECONDS = 3


def endless_compiler(path: pathlib.Path, argument: str, compiler: str, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Write the compiler, and allow it few seconds. Returns the file that will have the number of the process it waits for."""
    child = path.with_name("child")
    # The process holds the pipes that messages go through.
    text = f'#!/bin/sh\nif [ "$1" = {argument} ]; then sleep 1000 & echo $! >{child}; wait; fi\nexec {compiler} "$@"\n'
    path.write_text(text)
    path.chmod(0o755)
    monkeypatch.setattr(_compilers, "_MOST_SECONDS", SECONDS)
    return child


def check_killed(child: pathlib.Path) -> None:
    state = pathlib.Path("/proc", child.read_text().strip(), "stat")
    for _ in range(100):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("what the compiler has started still runs")
