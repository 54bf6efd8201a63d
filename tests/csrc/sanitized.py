"""Builds of the extension with sanitizers, and pytest on them."""

import faulthandler
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

from eqxcallback import _ext


ROOT = pathlib.Path(__file__).parents[2]


def library(name):
    path = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not pathlib.Path(path).is_absolute():
        pytest.skip(f"this g++ has no {name}")
    return path


def build(sanitizers, folder):
    faulthandler.cancel_dump_traceback_later()  # pytest's: how long a compiler takes says nothing of deadlocks
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", str(ROOT), "-w", str(folder)]
    tables = {path.stem.removeprefix("isa_") for path in (ROOT / "csrc/cpu").glob("isa_*.cc")}
    settings = {
        "cmake.define.EQXCALLBACK_SANITIZE": sanitizers,
        "cmake.define.EQXCALLBACK_UNSANITIZED": ";".join(sorted(tables - set(_ext.available_isas()))),
        "cmake.define.CMAKE_CXX_FLAGS_RELEASE": "",  # with asserts, and nanobind is quicker to compile
        "build-dir": str(folder / "build"),
    }
    command += [f"--config-settings={key}={value}" for key, value in settings.items()]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "package")
    return folder / "package"


def run(package, libraries, options, *arguments):
    """The output of pytest on the sanitized package; both have to be clean."""
    faulthandler.cancel_dump_traceback_later()  # each of those tests has one
    preload = " ".join(library(name) for name in (*libraries, "libstdc++.so.6"))
    environment = {**os.environ, "LD_PRELOAD": preload, **options}
    script = str(pathlib.Path(__file__).with_name("run_sanitized.py"))
    command = [sys.executable, script, str(package), "-q", "-p", "no:cacheprovider", *arguments]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "Sanitizer" not in output, output
    assert "runtime error" not in output, output
    return output
