"""Read what tests/csrc/every_kernel.cc prints."""

import subprocess

import numpy as np


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
