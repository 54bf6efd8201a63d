"""C++ beside this file, compiled when it is first needed."""

import atexit
import ctypes
import functools
import pathlib
import shutil
import subprocess
import tempfile

import jax


@functools.cache
def folder() -> pathlib.Path:
    """Return a folder for what is compiled, that goes when this process ends."""
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return pathlib.Path(made)


@functools.cache
def native_library(source: str, *options: str) -> str:
    """Compiled for this machine, against the headers of the jaxlib that runs. Returns the path of the library."""
    path = pathlib.Path(__file__).parent / source
    target = folder() / f"{path.stem}.so"
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-w", f"-I{jax.ffi.include_dir()}", *options]
    try:
        subprocess.run([*command, str(path), "-o", str(target)], check=True)
    except FileNotFoundError as error:
        raise RuntimeError(
            f"benchmarks: expected g++ to compile {source}, and found none. Install a C++ compiler."
        ) from error
    return str(target)


@functools.cache
def load(source: str, *options: str) -> ctypes.CDLL:
    return ctypes.CDLL(native_library(source, *options))
