"""Compile tests/csrc/every_kernel.cc, and read what it prints."""

import faulthandler
import pathlib
import subprocess

import numpy as np


ROOT = pathlib.Path(__file__).parents[2]


def compiled(compiler, folder, flags, *defines, others=(), link=("-static",)):
    """A program of every kernel, in the tables that have flags."""
    faulthandler.cancel_dump_traceback_later()  # pytest's: how long a compiler takes says nothing of deadlocks
    options = [
        *("-std=c++17", "-O1", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-I", str(ROOT / "csrc")),
        '-DEQXCALLBACK_VERSION="of a test"',
        *defines,
    ]
    sources = {f"csrc/cpu/{name}.cc": [] for name in ("isa", "measured", *others)} | {"tests/csrc/every_kernel.cc": []}
    sources |= {f"csrc/cpu/isa_{name}.cc": of_table for name, of_table in flags.items()}
    for source, of_source in sources.items():
        target = folder / pathlib.Path(source).with_suffix(".o").name
        subprocess.run([compiler, *options, *of_source, "-c", str(ROOT / source), "-o", str(target)], check=True)
    program = folder / "every_kernel"
    subprocess.run([compiler, *link, *map(str, folder.glob("*.o")), "-o", str(program)], check=True)
    return str(program)


def kernel_output(*command, **options):
    """The results of each instruction set, by its name."""
    data = subprocess.run(command, capture_output=True, check=True, **options).stdout
    results = {}
    while data:
        line, data = data.split(b"\n", 1)
        name, count = line.split()
        size = 4 * int(count)
        results[name.decode()], data = np.frombuffer(data[:size], np.float32), data[size:]
    return results


def assert_same(got, expected):
    """Products and sums in one rounding or two, in any order: of bf16, the last bit."""
    assert got.size == expected.size > 5000
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(got, expected, rtol=2.0**-7, atol=1e-3)
    assert np.mean(got == expected) > 0.5
