"""Triton on a CPU: functions run by its interpreter, in a process of its own."""

import ast
import atexit
import dataclasses
import functools
import importlib.util
import inspect
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ._errors import NotEmulated


_WORKER = pathlib.Path(__file__).with_name("_triton_worker.py")


def need_triton() -> None:
    """Raises `NotEmulated` if it is not there."""
    if importlib.util.find_spec("triton") is None:
        raise NotEmulated("Triton is not installed. Install eqxcallback[triton].")


@dataclasses.dataclass(frozen=True)
class TritonFunction:
    """A `triton.jit` function, as a text that another process makes it of.

    **Attributes:**

    - `portable`: for it, and each function that it calls, the source and what its names mean.
    """

    portable: bytes

    @classmethod
    @functools.lru_cache(maxsize=512)
    def of(cls, fn: Any) -> "TritonFunction":
        """**Raises:** `NotEmulated` if another process cannot have what it refers to."""
        if getattr(fn, "is_gluon", bool)():
            raise NotEmulated(f"Triton's interpreter does not run {fn.__name__}, which is written in Gluon.")
        return cls(pickle.dumps(_described(fn)))

    def run(
        self,
        grid: Sequence[int],
        pointers: Mapping[str, np.ndarray | None],
        scalars: Mapping[str, object],
        constants: bytes,
    ) -> list[str]:
        """Run its programs one after another. Arrays are what the kernel leaves; those over the same memory stay so.

        **Arguments:** `constants`: as `portable_constants` makes them.

        **Returns:** the names of the pointers beyond whose arrays it has written.

        **Raises:** `RuntimeError` with what the interpreter says.
        """
        if 0 in grid:
            return []
        arrays: dict[int, np.ndarray] = {}
        for array in pointers.values():
            if array is not None:
                arrays.setdefault(array.ctypes.data, array)
        order = {address: i for i, address in enumerate(arrays)}
        places = {name: None if a is None else order[a.ctypes.data] for name, a in pointers.items()}
        memory = [(array.tobytes(), array.dtype.name, array.size) for array in arrays.values()]
        left, overrun = _process_of(os.getpid()).ask(
            (self.portable, tuple(grid), memory, places, dict(scalars), constants)
        )
        for array, data, (before, _, _) in zip(arrays.values(), left, memory, strict=True):
            if data != before:
                array[...] = np.frombuffer(data, np.uint8).view(array.dtype).reshape(array.shape)
        return [name for name, i in places.items() if i in overrun]


def portable_constants(constants: Mapping[str, object]) -> bytes:
    """**Raises:** `NotEmulated` if another process cannot have them."""
    try:
        return pickle.dumps(dict(constants))
    except Exception as error:
        raise NotEmulated(f"a constexpr cannot be sent to another process ({error}).") from None


def _described(fn: Any) -> list[dict[str, Any]]:
    numbers: dict[Any, int] = {fn: 0}
    described: list[dict[str, Any]] = []
    waiting = [fn]
    while waiting:
        plain = waiting.pop(0).fn
        source = _source(plain)
        names: dict[str, tuple[str, Any]] = {}
        for name, value in _names_in(source, plain).items():
            if _is_jit(value) and not value.fn.__module__.startswith("triton."):
                if value not in numbers:
                    numbers[value] = len(numbers)
                    waiting.append(value)
                names[name] = "function", numbers[value]
            else:
                names[name] = _value(name, value, plain)
        described.append({"name": plain.__name__, "source": source, "names": names})
    return described


def _source(function: types.FunctionType) -> str:
    """Return the source from `def` on: decorators are Triton's own."""
    try:
        lines = textwrap.dedent("".join(inspect.getsourcelines(function)[0])).splitlines(keepends=True)
    except OSError as error:
        raise NotEmulated(f"the source of {function.__name__} cannot be read ({error}).") from None
    return "".join(lines[next(i for i, line in enumerate(lines) if line.startswith("def ")) :])


def _names_in(source: str, function: types.FunctionType) -> dict[str, Any]:
    """Return what the names in a function mean, in annotations and defaults too, except names that it defines itself."""
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    return {name: scope[name] for name in used & set(scope)}


def _is_jit(value: object) -> bool:
    return hasattr(value, "arg_names") and inspect.isfunction(getattr(value, "fn", None))


def _value(name: str, value: Any, function: types.FunctionType) -> tuple[str, Any]:
    if inspect.ismodule(value):
        return "module", value.__name__
    if _is_jit(value):
        return "attribute", (value.fn.__module__, value.fn.__name__)
    if type(value).__name__ == "constexpr":  # the interpreter does not wrap it
        value = value.value
    try:
        return "value", pickle.dumps(value)
    except Exception as error:
        raise NotEmulated(
            f"{function.__name__} refers to {name}, which cannot be sent to another process ({error})."
        ) from None


class _Process:
    """The interpreter. Calls from several threads take turns.

    **Arguments:** `parent`: the process that asks. One that is forked from it must not read its answers, nor wait for an end.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Any) -> tuple[list[bytes], list[int]]:
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                pickle.dump(request, process.stdin)
                process.stdin.flush()
                answer = pickle.load(process.stdout)
            except (EOFError, BrokenPipeError, pickle.UnpicklingError):
                code = process.wait()
                self._close()
                raise RuntimeError(f"the process of Triton's interpreter ended with status {code}") from None
            except BaseException:  # the answer that is due would be that of the next question
                process.kill()
                self._close()
                raise
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            atexit.register(self._close)
        return self._process

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._parent == os.getpid():
            process.communicate()


_process_of = functools.cache(_Process)
