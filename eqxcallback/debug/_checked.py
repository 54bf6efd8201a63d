"""Checked mode: kernels that leave outputs unwritten, change their inputs, or keep their buffers are found out."""

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import _ext, xla
from ..core import callable_name
from . import _strict
from ._child import has_returned, problems_of_child
from ._compare import call_and_compare


_SECONDS = 10.0  # for one call of a user's native kernel

_lock = threading.Lock()
_depth = 0


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Within this context every kernel on a CPU is checked, in Python and in C++, in all threads and also in compiled programs.
    They run on copies of their operands and results.

    - Outputs are filled with noise first: elements that were never written are an error that names them. Those of an output
        that overwrites an input are not checked.
    - Inputs that changed are an error, and so is a write to the 1024 bytes before or after an operand or result.
    - Bytes of a bool other than 0 and 1 are an error, in outputs and inputs.
    - In native kernels of yours: each call runs in a child process, so that a crash, an `abort()`, an exception and a call that
        takes more than 10 seconds are errors as well, and so is a read or write farther away, which says where. Attributes
        that a kernel is given and never reads are an error. What a kernel keeps for its next call is forgotten. The child has
        one thread: `ffi::ThreadPool` and OpenMP work in it, other threads that were made before do not. Kernels that
        return an `ffi::Future` are not checked.
    - In Python kernels: a Buffer, or an array over one, that was kept past the call is an error.
    - In Python kernels: an assignment to `out.numpy()`, or to a view of it, that broadcasts an array, or casts to a type that
        holds less (as floats to integers), is an error. Those to `np.asarray(out)` cannot be seen.

    The environment variable `EQXCALLBACK_CHECKED=1` does the same for the whole process. It is slow. Where elements look
    unwritten and that may be by chance, the kernel is run again on other noise to be sure.

    !!! example

        ```python
        with eqxcallback.debug.checked():
            y = step(x)
        ```
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _depth
    with _lock:
        _depth += 1
        _ext.set_checked_call(_checked_call)
        _ext.set_checked_native(_checked_native, _SECONDS)
        _strict.switch(on=True)


def _leave() -> None:
    global _depth
    with _lock:
        _depth -= 1
        if _depth == 0:
            _ext.set_checked_call(None)
            _ext.set_checked_native(None)
            _strict.switch(on=False)


def resume() -> None:
    """Resume checked mode after something else had its place."""
    with _lock:
        _ext.set_checked_call(_checked_call if _depth else None)


def _checked_call(
    body: Callable[..., None],
    direct: bool,
    ctx: _ext.ExecutionContext,
    outputs: tuple[_ext.Buffer, ...],
    inputs: tuple[_ext.Buffer, ...],
) -> None:
    def call() -> None:
        with _strict.strict(outputs, kernel):
            results.append(body(ctx, *outputs, *inputs) if direct else body(ctx, outputs, inputs))

    results: list[None] = []
    kernel = callable_name(body.callback if isinstance(body, xla.PythonBody) else body)
    if ctx.platform != "cpu":
        call()
        return results[-1]
    before = _references(outputs, inputs)
    problems = call_and_compare(call, outputs, inputs)
    after = _references(outputs, inputs)
    if after != before:
        gc.collect()  # what refers to itself goes away without anybody's keeping it
        after = _references(outputs, inputs)
    for (name, now), (_, then) in zip(after, before, strict=True):
        if now > then:
            problems.append(
                f"{name} was kept past the call, or an array over it was: its memory is XLA's again. Copy it"
            )
    _report(problems)
    return results[-1]  # which has to be None


def _checked_native(
    symbol: str,
    run: Callable[[], dict[str, Any] | None],
    outputs: tuple[_ext.Buffer, ...],
    inputs: tuple[_ext.Buffer, ...],
) -> None:
    del symbol  # the failure has it
    problems: dict[str, None] = {}  # the kernel may run several times

    def call() -> None:
        if (said := run()) is not None:  # a user's kernel, in a child process
            problems.update(dict.fromkeys(problems_of_child(said, outputs, inputs, _SECONDS)))
            if not has_returned(said):
                _report(list(problems))

    differences = call_and_compare(call, outputs, inputs)
    _report([*problems, *differences])


def _report(problems: Sequence[str]) -> None:
    if problems:
        raise RuntimeError("checked mode found: " + "; ".join(problems))


def _references(outputs: Sequence[_ext.Buffer], inputs: Sequence[_ext.Buffer]) -> list[tuple[str, int]]:
    """Count the references to each buffer, to be compared between two calls of this function."""
    sides = ("output", outputs), ("input", inputs)
    return [(f"{kind} {i}", sys.getrefcount(side[i])) for kind, side in sides for i in range(len(side))]


if os.environ.get("EQXCALLBACK_CHECKED", "") not in ("", "0"):
    _enter()
