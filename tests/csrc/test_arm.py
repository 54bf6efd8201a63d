"""The portable kernels on another processor: they compile for ARM, whose vectors are NEON, and compute there what they do here,
where all other tests are run on them.
"""

import pathlib
import shutil
import subprocess

import pytest

from .kernel_output import assert_same, kernel_output


ROOT = pathlib.Path(__file__).parents[2]
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SOURCES = ["tests/csrc/every_kernel.cc", "csrc/cpu/isa.cc", "csrc/cpu/isa_portable.cc"]


def output(compiler, tmp_path, *command):
    program = str(tmp_path / pathlib.Path(compiler).name)
    options = ["-std=c++17", "-O1", "-static", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-I", str(ROOT / "csrc")]
    sources = [str(ROOT / source) for source in SOURCES]
    subprocess.run([compiler, *options, "-DEQXCALLBACK_PORTABLE", *sources, "-o", program], check=True)
    return kernel_output(*command, program)["portable"]


@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"no {CROSS} here: Debian's package g++-aarch64-linux-gnu")
@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} here: Debian's package qemu-user")
def test_arm_computes_what_this_processor_does(tmp_path):
    assert_same(output(CROSS, tmp_path, EMULATOR), output("g++", tmp_path))
