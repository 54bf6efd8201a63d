"""The portable kernels on another processor: they compile for ARM, whose vectors are NEON, and compute there what they do here,
where all other tests are run on them.
"""

import pathlib
import shutil
import subprocess

import numpy as np
import pytest


ROOT = pathlib.Path(__file__).parents[2]
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def output(compiler, tmp_path, *command):
    program = str(tmp_path / pathlib.Path(compiler).name)
    options = ["-std=c++17", "-O2", "-static", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-I", str(ROOT / "csrc")]
    source = str(ROOT / "tests/csrc/portable_kernels.cc")
    subprocess.run([compiler, *options, source, "-o", program], check=True)
    return np.frombuffer(subprocess.run([*command, program], capture_output=True, check=True).stdout, np.float32)


@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"no {CROSS} here: Debian's package g++-aarch64-linux-gnu")
@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} here: Debian's package qemu-user")
def test_arm_computes_what_this_processor_does(tmp_path):
    here, there = output("g++", tmp_path), output(CROSS, tmp_path, EMULATOR)
    assert here.size == there.size > 5000
    assert np.isfinite(here).all()
    # Products and sums in one rounding or two: of bf16, the last bit.
    np.testing.assert_allclose(there, here, rtol=2.0**-7, atol=2e-3 * float(np.sqrt(np.mean(here**2))))
    assert np.mean(there == here) > 0.5
