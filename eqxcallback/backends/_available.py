"""The kinds of kernels that can run here."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from .. import _ext, emulation, xla
from ..kernel import Emulated, Kernel, TritonKernel
from . import _numba, _nvrtc, _tvm_ffi
from ._architecture import OLDEST_OF_TRITON, architecture, version_of


def available_backends() -> Mapping[str, bool | str]:
    """Tell which kinds of kernels can run in this process: `{name: True}`, or `{name: why not}`.

    - `"python"`: a [`eqxcallback.PythonKernel`][] or the kernel of a layer.
    - `"jax"`: a [`eqxcallback.JaxKernel`][].
    - `"native"`: a [`eqxcallback.NativeKernel`][].
    - `"c"`: a [`eqxcallback.CKernel`][].
    - `"numba"`: a [`eqxcallback.NumbaKernel`][].
    - `"tvm_ffi"`: a [`eqxcallback.TvmFfiKernel`][].
    - `"cuda"`: a [`eqxcallback.CudaKernel`][].
    - `"image"`: a [`eqxcallback.ImageKernel`][].
    - `"triton"`: a [`eqxcallback.TritonKernel`][].
    - `"cupy"`: CuPy's arrays over our buffers in a Python kernel, on a GPU.
    - `"emulation"`: a [`eqxcallback.CudaKernel`][] on a CPU, for [`eqxcallback.testing.check`][], which needs g++.

    A kernel that cannot run here may still be lowered: kernels are compiled without a GPU.
    """
    return {
        "python": True,
        "jax": True,
        "native": True,
        "c": xla.why_no_c_functions() or True,
        "numba": _first_problem(_numba.need_numba),
        "tvm_ffi": _first_problem(_tvm_ffi.need_tvm_ffi),
        "cuda": _first_problem(_nvrtc.find, _ext.gpu_driver_version),
        "image": _first_problem(_ext.gpu_driver_version),
        "triton": _first_problem(_triton, _ext.gpu_driver_version),
        "cupy": _first_problem(lambda: _imported("cupy", "cuda13"), _ext.gpu_driver_version),
        "emulation": emulation.unavailable() or True,
    }


def missing(backend: str) -> str | None:
    """Why no kernel of this kind can be compiled here, or `None`. It imports packages."""
    needed = {
        "cuda": _nvrtc.find,
        "triton": _triton,
        "numba": _numba.need_numba,
        "tvm_ffi": _tvm_ffi.need_tvm_ffi,
    }
    need = needed.get(backend)
    problem = True if need is None else _first_problem(need)
    return problem if isinstance(problem, str) else None


def why_not_here(kernel: Kernel) -> str | None:
    """Why this kernel cannot be compiled here, or `None`."""
    if isinstance(kernel, Emulated):  # for another compiler
        return None
    if isinstance(kernel, TritonKernel) and version_of(arch := architecture(kernel.arch)) < OLDEST_OF_TRITON:
        return f"Triton compiles for sm_{OLDEST_OF_TRITON} and newer, and not for {arch}."
    return missing(kernel.backend)


def _triton() -> None:
    _imported("triton", "triton")


def _first_problem(*needed: Callable[[], Any]) -> bool | str:
    for need in needed:
        try:
            need()
        except Exception as error:  # libraries that do not fit raise anything
            return str(error)
    return True


def _imported(module: str, extra: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} cannot be imported ({error}). Install eqxcallback[{extra}].") from None
