"""Measure the memory that programs need."""

import pathlib
from typing import Any

import jax


def peak(f, *args):
    """Return how many bytes more than before are in use while `f(*args)` runs."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use

    def read(key):
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(status.split(f"{key}:")[1].split()[0])

    before = read("VmRSS")
    jax.block_until_ready(f(*args))
    return read("VmHWM") - before


def compiled(f, *args) -> Any:
    program = jax.jit(f).lower(*args).compile()
    jax.block_until_ready(program(*args))
    return program
