"""Handlers in shared libraries of users: found, asked whether they are handlers, and registered when they are needed."""

import ctypes
import dataclasses
import os
import signal
import threading

import jax

from ... import _ext
from ._targets import CPU_OPS, FOR_EACH, register_handler


_SECONDS = 5.0  # for an answer

_lock = threading.Lock()
_versions: dict[str, list[str]] = {}  # of each library, the contents seen, in order
_answers: dict[tuple[str, str], str | None] = {}
_fronts: dict[tuple[str, str], tuple[int, object]] = {}
# For each handler on a CPU what its front was made of, and the ops that call it.
_on_cpu: dict[str, tuple[tuple[int, str, int, int], list[str]]] = {}


@dataclasses.dataclass(frozen=True)
class LibraryFunction:
    """The function `symbol` of a library of this content.

    **Attributes:**

    - `path`: under which the loader knows the library.
    - `set_threads`: the address of OpenMP's `omp_set_num_threads`, if the library has it, or zero.
    """

    digest: str
    symbol: str
    address: int
    set_threads: int
    path: str

    def refusal(self) -> str | None:
        """Say what the function did when asked for its metadata, if it is not a handler. It is asked once, in another process."""
        key = (self.digest, self.symbol)
        with _lock:
            if key not in _answers:
                _answers[key] = _refusal(_ext.describe_function(self.address, _SECONDS))
            return _answers[key]

    def register(self, target: str, platform: str, op: str) -> None:
        """Register it under the name `target`, and name `op` in its errors."""
        key = (target, platform)
        with _lock:
            if key not in _fronts:
                _fronts[key] = _ext.front(self.address, self.symbol, platform == "cpu", self.set_threads)
            number, handler = _fronts[key]
        register_handler(target, handler, platform)
        if platform == "cpu":
            _remember(target, (self.address, self.symbol, self.set_threads, 0), op)
        if number >= 0:  # there are fronts for some hundred handlers only
            _ext.name_caller(number, op)


def register_c_function(target: str, symbol: str, address: int, set_threads: int, op: str) -> None:
    """Register a handler that calls C functions, and name `op` in its errors.

    **Arguments:**

    - `address`: of the function, or zero if each call has one of its own.
    - `set_threads`: as in `LibraryFunction`.

    **Raises:** `RuntimeError` if there are too many, or C functions cannot be called on this machine.
    """
    if (reason := why_no_c_functions()) is not None:
        raise RuntimeError(reason)
    register_front(target, "cpu", _ext.c_call_handler(), symbol, set_threads, address, op)


def register_front(
    target: str, platform: str, handler: int, symbol: str, set_threads: int, address: int, op: str
) -> None:
    """Register a front for `handler` that knows the function at `address`. See `register_c_function`."""
    key = (target, platform)
    with _lock:
        if key not in _fronts:
            front = _ext.front(handler, symbol, platform == "cpu", set_threads, address)
            if front[0] < 0:
                raise RuntimeError("this process calls too many C functions. Start another one, or call them from one.")
            _fronts[key] = front
        number, capsule = _fronts[key]
    register_handler(target, capsule, platform)
    if platform == "cpu":
        _remember(target, (handler, symbol, set_threads, address), op)
    _ext.name_caller(number, op)


def _remember(target: str, made_of: tuple[int, str, int, int], op: str) -> None:
    with _lock:
        ops = _on_cpu.setdefault(target, (made_of, []))[1]
        if op not in ops:
            ops.append(op)


def target_for_each(target: str) -> str:
    """A handler that calls the one of `target`, on a CPU, for each example of a batch, on XLA's threads: registered, its name.

    **Raises:** `RuntimeError` if there are too many.
    """
    name = target + FOR_EACH
    if target in CPU_OPS.values():
        return name
    (address, symbol, set_threads, function), ops = _on_cpu[target]
    with _lock:
        if (name, "cpu") not in _fronts:
            front = _ext.front(address, symbol, True, set_threads, function, for_each=True)
            if front[0] < 0:
                raise RuntimeError(
                    f'{ops[0]}: this process calls too many kernels for vmap_method="threads". Start another one, or use '
                    '"sequential".'
                )
            _fronts[name, "cpu"] = front
        number, handler = _fronts[name, "cpu"]
    register_handler(name, handler, "cpu")
    for op in ops:
        _ext.name_caller(number, op)
    return name


def headers() -> tuple[str, str]:
    """The folder of the headers that handlers are compiled with, and their version."""
    return jax.ffi.include_dir(), jax.lib.__version__


def why_no_c_functions() -> str | None:
    """Why functions whose parameters are not known before cannot be called on this machine, or `None`."""
    known = _ext.registers_and_stack[2] >= 0
    return (
        None
        if known
        else "C functions are called on x86-64 and 64-bit ARM, on Linux and macOS; this machine is another."
    )


def library_function(path: str, digest: str, symbol: str) -> LibraryFunction:
    """Load a function of the shared library at `path`, of this content. It stays loaded."""
    with _lock:
        versions = _versions.setdefault(path, [])
        if digest not in versions:
            versions.append(digest)
    # The loader takes a name that it has loaded before for the same library. One that was rebuilt needs another spelling.
    folder, name = os.path.split(path)
    path = os.path.join(folder, "./" * versions.index(digest) + name)
    library = ctypes.CDLL(path)
    set_threads = address_of(library.omp_set_num_threads) if hasattr(library, "omp_set_num_threads") else 0
    return LibraryFunction(digest, symbol, address_of(getattr(library, symbol)), set_threads, path)


def address_of(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # pyright: ignore[reportArgumentType]


def _refusal(ending: tuple[str, int, int, bool, str] | None) -> str | None:
    if ending is None:
        return None
    kind, number, *_ = ending
    match kind:
        case "returned":
            return "did not answer"
        case "threw":
            return "threw a C++ exception"
        case "signal":
            return f"crashed ({signal.strsignal(number)})"
        case "exit":
            return f"ended the process with status {number}"
        case "time limit":
            return f"did not answer within {_SECONDS:g} s"
    return None  # no process could be started
