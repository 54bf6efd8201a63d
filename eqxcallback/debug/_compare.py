"""One call of a kernel, and what of it was wrong."""

from collections.abc import Callable, Sequence

import numpy as np

from .. import _ext
from ._guards import Guards, memory


def call_and_compare(
    call: Callable[[], None], outputs: Sequence[_ext.Buffer], inputs: Sequence[_ext.Buffer]
) -> list[str]:
    """Call a kernel on copies of its operands and results. Returns what it did wrong, in words."""
    named = [
        (f"{kind} {i} ({b!r})", b)
        for kind, side in (("output", outputs), ("input", inputs))
        for i, b in enumerate(side)
    ]
    with Guards(named) as guards:
        problems = _compare(call, outputs, inputs)
    return problems + guards.problems


def _compare(call: Callable[[], None], outputs: Sequence[_ext.Buffer], inputs: Sequence[_ext.Buffer]) -> list[str]:
    problems = [
        f"input {i} ({b!r}) has bytes other than 0 and 1 before the call, which no bool has"
        for i, b in enumerate(inputs)
        if b.dtype == np.bool_ and (_bits(b) > 1).any()
    ]
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
        call()
        return [(_bits(buffer) == filled).all(axis=1) for (_, buffer), filled in zip(fresh, noise, strict=True)]

    untouched = untouched_after_call(seed=1)
    problems += [f"{name} was changed" for name, buffer, before in kept if not np.array_equal(_bits(buffer), before)]
    if any(mask.any() and b.dtype.itemsize <= 2 for (_, b), mask in zip(fresh, untouched, strict=True)):
        for buffer, before in aliased:
            _bits(buffer)[...] = before
        again = untouched_after_call(seed=2)
        untouched = [first & second for first, second in zip(untouched, again, strict=True)]
    for (name, buffer), mask in zip(fresh, untouched, strict=True):
        if mask.any():
            first = tuple(int(i) for i in np.argwhere(_as_laid_out(mask, buffer))[0])
            count = f"{int(mask.sum())} of {buffer.size}"
            problems.append(f"{name}: {count} elements were never written, the first at {first}")
        elif buffer.dtype == np.bool_ and (_bits(buffer) > 1).any():
            problems.append(f"{name} has bytes other than 0 and 1, which no bool has")
    return problems


def _bits(buffer: _ext.Buffer) -> np.ndarray:
    """The elements of `buffer` as they lie in memory, a row of bytes for each. Writeable."""
    if buffer._packed:
        return np.asarray(buffer).reshape(-1).view(np.uint8).reshape(buffer.size, buffer.dtype.itemsize)
    return memory(buffer).reshape(buffer.size, buffer.dtype.itemsize)


def _as_laid_out(mask: np.ndarray, buffer: _ext.Buffer) -> np.ndarray:
    """What is said of elements in memory, in the shape of `buffer`."""
    strides = [stride // buffer.dtype.itemsize for stride in buffer.strides]
    return np.lib.stride_tricks.as_strided(mask, buffer.shape, strides)


def _fill(buffer: _ext.Buffer, seed: int) -> np.ndarray:
    """Write noise, which is returned. Bools get bytes that no bool has."""
    bits = _bits(buffer)
    noise = np.random.default_rng(seed).integers(0, 256, bits.shape, np.uint8)
    if buffer.dtype == np.bool_:
        noise |= 0x80
    bits[...] = noise
    return bits.copy()
