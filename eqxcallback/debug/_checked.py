"""Checked mode: kernels that leave outputs unwritten, change their inputs, or keep their buffers are found out."""

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .. import _ext


_lock = threading.Lock()
_depth = 0


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Within this context every Python kernel on a CPU is checked, in all threads and also in compiled programs.

    - Outputs are filled with noise first: elements that were never written are an error that names them. Those of an output
        that overwrites an input are not checked.
    - Inputs that changed are an error.
    - Bytes of a bool output other than 0 and 1 are an error.
    - A Buffer, or an array over one, that was kept past the call is an error.

    The environment variable `EQXCALLBACK_CHECKED=1` does the same for the whole process. It is slow. Where elements of one or
    two bytes look unwritten by chance, the kernel is run again on other noise to be sure.

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


def _leave() -> None:
    global _depth
    with _lock:
        _depth -= 1
        if _depth == 0:
            _ext.set_checked_call(None)


def resume() -> None:
    """After something else had the place of checked mode."""
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
        return body(ctx, *outputs, *inputs) if direct else body(ctx, outputs, inputs)

    if ctx.platform != "cpu":
        return call()
    before = _references(outputs, inputs)
    result, problems = _call_and_compare(call, outputs, inputs)
    after = _references(outputs, inputs)
    if after != before:
        gc.collect()  # what refers to itself goes away without anybody's keeping it
        after = _references(outputs, inputs)
    for (name, now), (_, then) in zip(after, before, strict=True):
        if now > then:
            problems.append(
                f"{name} was kept past the call, or an array over it was: its memory is XLA's again. Copy it"
            )
    if problems:
        raise RuntimeError("checked mode found: " + "; ".join(problems))
    return result


def _call_and_compare(
    call: Callable[[], None], outputs: Sequence[_ext.Buffer], inputs: Sequence[_ext.Buffer]
) -> tuple[None, list[str]]:
    input_places = {b._address for b in inputs if b.size}
    output_places = {b._address for b in outputs if b.size}
    fresh = [(f"output {i} ({b!r})", b) for i, b in enumerate(outputs) if b.size and b._address not in input_places]
    aliased = [(b, _bits(b).copy()) for b in outputs if b.size and b._address in input_places]
    kept = [
        (f"input {i} ({b!r})", b, _bits(b).copy())
        for i, b in enumerate(inputs)
        if b.size and b._address not in output_places
    ]

    def untouched_after_call(seed: int) -> list[np.ndarray]:
        noise = [_fill(buffer, seed) for _, buffer in fresh]
        results.append(call())
        return [(_bits(buffer) == filled).all(axis=1) for (_, buffer), filled in zip(fresh, noise, strict=True)]

    results: list[None] = []
    untouched = untouched_after_call(seed=1)
    problems = [f"{name} was changed" for name, buffer, before in kept if not np.array_equal(_bits(buffer), before)]
    if any(mask.any() and b.dtype.itemsize <= 2 for (_, b), mask in zip(fresh, untouched, strict=True)):
        for buffer, before in aliased:
            _bits(buffer)[...] = before
        again = untouched_after_call(seed=2)
        untouched = [first & second for first, second in zip(untouched, again, strict=True)]
    for (name, buffer), mask in zip(fresh, untouched, strict=True):
        if mask.any():
            first = tuple(int(i) for i in np.argwhere(mask.reshape(buffer.shape))[0])
            count = f"{int(mask.sum())} of {buffer.size}"
            problems.append(f"{name}: {count} elements were never written, the first at {first}")
        elif buffer.dtype == np.bool_ and (_bits(buffer) > 1).any():
            problems.append(f"{name} has bytes other than 0 and 1, which no bool has")
    return results[-1], problems


def _references(outputs: Sequence[_ext.Buffer], inputs: Sequence[_ext.Buffer]) -> list[tuple[str, int]]:
    """How often each buffer is referred to; to be compared between two calls of this function."""
    counts = [(f"output {i}", sys.getrefcount(outputs[i])) for i in range(len(outputs))]
    return counts + [(f"input {i}", sys.getrefcount(inputs[i])) for i in range(len(inputs))]


def _bits(buffer: _ext.Buffer) -> np.ndarray:
    """The memory of `buffer` as bytes, one row for each element. Writeable if the buffer is."""
    return buffer.numpy().reshape(-1).view(np.uint8).reshape(buffer.size, buffer.dtype.itemsize)


def _fill(buffer: _ext.Buffer, seed: int) -> np.ndarray:
    """Write noise, which is returned. Bools get bytes that no bool has."""
    bits = _bits(buffer)
    noise = np.random.default_rng(seed).integers(0, 256, bits.shape, np.uint8)
    if buffer.dtype == np.bool_:
        noise |= 0x80
    bits[...] = noise
    return bits.copy()


if os.environ.get("EQXCALLBACK_CHECKED", "") not in ("", "0"):
    _enter()
