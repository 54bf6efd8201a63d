"""Calls of plain C functions, under a sanitizer, and on ARM, whose calling convention is another."""

import pathlib
import shutil
import subprocess

import pytest


pytestmark = pytest.mark.any_jax_version

ROOT = pathlib.Path(__file__).parents[2]
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
OPTIONS = ["-std=c++17", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-I", str(ROOT / "csrc")]


def says_ok(compiler, tmp_path, *options, run=()):
    program = tmp_path / "plain_call_test"
    source = ROOT / "tests/csrc/plain_call_test.cc"
    subprocess.run([compiler, *OPTIONS, *options, str(source), "-o", str(program)], check=True)
    done = subprocess.run([*run, str(program)], capture_output=True, text=True, check=True)
    return done.stdout == "ok\n"


@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_every_parameter_arrives(tmp_path, level):
    assert says_ok("g++", tmp_path, level, "-fsanitize=address,undefined", "-fno-sanitize-recover")


@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"no {CROSS} here: Debian's package g++-aarch64-linux-gnu")
@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} here: Debian's package qemu-user")
def test_every_parameter_arrives_on_arm(tmp_path):
    assert says_ok(CROSS, tmp_path, "-O2", "-static", run=(EMULATOR,))
