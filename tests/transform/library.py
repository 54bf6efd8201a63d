"""Shared libraries as users have them, compiled when a test wants one."""

import functools
import pathlib
import subprocess
import tempfile

import jax


FOLDER = pathlib.Path(__file__).parent
_built = tempfile.TemporaryDirectory()

# The library of saxpy.cc. Kernels may name it before it is there: see `build_saxpy`.
SAXPY = pathlib.Path(_built.name) / "libsaxpy.so"


def build(path: pathlib.Path, source: str | pathlib.Path = "saxpy.cc", *flags: str) -> pathlib.Path:
    """`source` is one of this folder, or any by its whole path."""
    command = ["g++", "-std=c++17", "-O0", "-fPIC", "-shared", "-isystem", jax.ffi.include_dir(), *flags]
    subprocess.run([*command, str(FOLDER / source), "-o", str(path)], check=True)
    return path


@functools.cache
def build_saxpy():
    build(SAXPY)
