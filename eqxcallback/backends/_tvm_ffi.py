"""Functions of the TVM-FFI ABI: found in libraries and in memory, and what a program passes to them."""

import dataclasses
import functools
import hashlib
import importlib
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _ext, xla
from ..core import Aval
from ..kernel import TvmFfiKernel
from . import _c
from ._bound_kernel import BoundKernel
from ._description import description
from ._device_call import called, typed, workspaces_of
from ._library import function_of as function_of_library
from ._parameters import Array
from ._tvm_ffi_arguments import Arguments


@dataclasses.dataclass(frozen=True)
class _Function:
    """**Attributes:**

    - `target`: the name of the handler that calls it.
    - `handle`: of the function in memory, or zero if the handler knows a library's.
    """

    target: str
    handle: int


def prepare(bound: BoundKernel, kernel: TvmFfiKernel, platform: str, who: str) -> xla.TypedLowering:
    function = function_of(kernel, platform, who)

    def call(operands: Sequence[Aval], results: Sequence[Aval]) -> xla.LaunchLowering:
        return _lowered(function, kernel, bound, f"{who}[tvm_ffi]", operands, results)

    def describe() -> str:
        # The target knows the content of the library.
        declared = description(dataclasses.replace(kernel, module=None), f"{who}[tvm_ffi]")
        return f"{function.target} {function.handle} {declared}"

    return xla.TypedLowering(call, function.target, describe, bound.call)


def need_tvm_ffi() -> Any:
    """The package, and its library known to handlers."""
    try:
        package = importlib.import_module("tvm_ffi")
    except ImportError as error:
        raise ImportError(f"tvm_ffi cannot be imported ({error}). Install eqxcallback[tvm-ffi].") from None
    _load_runtime(package)
    return package


@functools.cache
def _load_runtime(package: Any) -> None:
    xla.load_tvm_ffi(package.libinfo.find_libtvm_ffi())


def function_of(kernel: TvmFfiKernel, platform: str, op: str) -> _Function:
    """Found, and its handler registered."""
    who = f"{op}[tvm_ffi]"
    if platform not in ("cpu", "cuda"):
        raise ValueError(
            f"{who}: expected the platform cpu or cuda; got {platform}. Give {platform} a kernel of another kind."
        )
    try:
        package = need_tvm_ffi()
    except ImportError as error:
        raise ValueError(f"{who}: {error}") from None
    if kernel.is_in_memory:
        handle, what, address, set_threads = _handle_in_memory(package, kernel, who), "in memory", 0, 0
    else:
        remedy = (
            f"Export it with TVM_FFI_DLL_EXPORT_TYPED_FUNC({kernel.name}, ...), or pass the tvm_ffi.Module that has it."
        )
        function = function_of_library(kernel.module, f"__tvm_ffi_{kernel.name}", who, remedy)
        _load(package, function, who)
        handle, what, address, set_threads = 0, function.digest, function.address, function.set_threads
    # The name stands in compiled programs: it says what the code is, and which handler calls it.
    what = f"tvm_ffi {kernel.name} {what}{' captured' if kernel.command_buffer_compatible else ''}"
    name = re.sub(r"\W", "_", kernel.name)
    target = f"eqxcallback_{name}_{hashlib.blake2b(what.encode(), digest_size=8).hexdigest()}"
    try:
        xla.register_tvm_ffi_function(
            target, kernel.name, address, set_threads, platform, kernel.command_buffer_compatible, op
        )
    except RuntimeError as error:
        raise ValueError(f"{who}: {error}") from None
    return _Function(target, handle)


# What programs call has to stay: as long as the process, as nobody tells when a program is gone.
_modules: dict[str, Any] = {}
_functions: dict[tuple[Any, str], Any] = {}
_in_programs: dict[int, Any] = {}
_lock = threading.Lock()


def _load(package: Any, function: xla.LibraryFunction, who: str) -> None:
    """Load the library as a module: that tells it its context, and loads what is embedded in it."""
    with _lock:
        if function.path in _modules:
            return
        try:
            _modules[function.path] = package.load_module(function.path)
        except Exception as error:  # what loaders of modules raise
            raise ValueError(f"{who}: TVM-FFI does not load the library {function.path} ({error}).") from error


def _handle_in_memory(package: Any, kernel: TvmFfiKernel, who: str) -> int:
    if isinstance(kernel.module, package.Function):
        function = kernel.module
    elif kernel.module is None:
        function = package.get_global_func(kernel.name, allow_missing=True)
        if function is None:
            raise ValueError(
                f"{who}: expected {kernel.name!r} to be the name of a global function of TVM-FFI; there is none. Register it "
                "with tvm_ffi.register_global_func, or pass the module that has it."
            )
    elif isinstance(kernel.module, package.Module):
        function = _function_of_module(kernel.module, kernel.name, who)
    else:
        raise ValueError(f"{who}: expected module to be a tvm_ffi.Module or a tvm_ffi.Function; got {kernel.module!r}.")
    handle = int(function.__chandle__())
    with _lock:
        _in_programs.setdefault(handle, function)
    return handle


def _function_of_module(module: Any, name: str, who: str) -> Any:
    """The same one each time: a module makes another object for each question."""
    with _lock:
        if (module, name) not in _functions:
            try:
                _functions[module, name] = module.get_function(name, query_imports=True)
            except AttributeError:
                raise ValueError(f"{who}: the module {module!r} has no function {name!r}. Correct the name.") from None
        return _functions[module, name]


def _lowered(
    function: _Function,
    kernel: TvmFfiKernel,
    bound: BoundKernel,
    who: str,
    operands: Sequence[Aval],
    results: Sequence[Aval],
) -> xla.LaunchLowering:
    """A call with arrays of these types."""
    assert bound.arguments is not None
    args, options = bound.arguments(typed(operands), typed(results))
    workspaces = workspaces_of(kernel.workspaces, args, options, who)
    functions = {name: called(value, name, args, options, who) for name, value in kernel.scalars.items()}
    arrays = _c.arrays_by_name(bound, operands, results, workspaces)
    groups = {
        "args": _group([i for _, i in bound.operands], operands, 0),
        "rets": _group([i for _, i in bound.results], results, len(operands)),
        "workspaces": _group(range(len(workspaces)), workspaces, len(operands) + len(results)),
    }
    given = Arguments(arrays, groups, {**bound.options, **functions}, who)
    for word in kernel.arg_spec:
        given.add(str(word))
    attributes = {
        # An attribute that is an empty array has no type: one number more.
        "parameters": np.array([0, *given.numbers], np.int64),
        "texts": given.texts,
        # One of another process is not found in a cache, and is an error in a program that was saved.
        "handle": np.int64(function.handle),
        "process": np.int64(_ext.c_call_process if function.handle else 0),
    }
    made = tuple(xla.result_aval(workspace.shape, workspace.dtype) for workspace in workspaces)
    return xla.LaunchLowering(function.target, attributes, bound.call, made)


def _group(indices: Sequence[int | None], avals: Sequence[Aval], after: int) -> list[Array]:
    """**Arguments:** `after`: how many arrays come before those of the group."""
    return [Array(None, None) if i is None else Array(after + i, avals[i]) for i in indices]
