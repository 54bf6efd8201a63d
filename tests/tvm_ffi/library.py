"""The shared library of functions.cc."""

import functools
import pathlib
import subprocess
import tempfile
from typing import Any

import pytest

from eqxcallback import TvmFfiKernel


tvm_ffi: Any = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
_FOLDER = tempfile.TemporaryDirectory(prefix="eqxcallback-tvm-ffi-")
PATH = f"{_FOLDER.name}/libfunctions.so"


@functools.cache
def build() -> None:
    """Build the library at `PATH`. Not when a file of tests is imported, as several processes import all of them."""
    source = pathlib.Path(__file__).with_name("functions.cc")
    includes = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", *includes, source, "-o", PATH], check=True)


SAXPY = "x", "y", "out", "a"


def saxpy(**more: Any) -> TvmFfiKernel:
    return TvmFfiKernel(PATH, "saxpy", SAXPY, **more)


def saxpy_reference(x: Any, y: Any, *, a: float) -> Any:
    return a * x + y
