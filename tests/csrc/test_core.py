"""The C++ core on its own, in plain C++, under sanitizers."""

import pathlib
import re
import subprocess

import jax
import pytest


ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_the_core(sanitizers, tmp_path):
    program = str(tmp_path / "core_test")
    command = ["g++", "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizers}"]
    command += ["-I", str(ROOT / "csrc"), "-isystem", jax.ffi.include_dir(), str(ROOT / "tests/csrc/core_test.cc")]
    subprocess.run([*command, "-o", program, "-lpthread"], check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "ok\n", "")


@pytest.mark.parametrize("room", ["core", "cpu", "gpu"])
def test_rooms_without_python(room):
    files = sorted(path for path in (ROOT / "csrc" / room).rglob("*") if path.suffix in (".h", ".cc"))
    assert files
    for path in files:
        included = re.findall(r'#include [<"]([^>"]+)[>"]', path.read_text())
        assert not [name for name in included if re.match(r"Python\.h|nanobind/|numpy/|python/", name)], path.name
