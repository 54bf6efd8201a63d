"""The shared library of functions.c."""

import functools
import pathlib
import subprocess
import tempfile
from typing import Any

from eqxcallback import CKernel


_FOLDER = tempfile.TemporaryDirectory(prefix="eqxcallback-c-")
SOURCE = pathlib.Path(__file__).with_name("functions.c")


@functools.cache
def path() -> pathlib.Path:
    return build(pathlib.Path(_FOLDER.name, "libfunctions.so"), SOURCE)


def build(library: pathlib.Path, source: pathlib.Path, *flags: str) -> pathlib.Path:
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags]
    subprocess.run(["gcc", *options, source, "-o", library, "-lm"], check=True)
    return library


def kernel(symbol: str, *parameters: str, **more: Any) -> CKernel:
    return CKernel(symbol, path(), parameters, **more)


SAXPY = "int64_t x.size", "float a", "const float* x", "float* out"


def saxpy(**more: Any) -> CKernel:
    return kernel("saxpy", *SAXPY, aliases={"y": 0}, **more)


def saxpy_reference(x: Any, y: Any, *, a: float) -> Any:
    return a * x + y
