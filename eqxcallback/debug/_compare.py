"""One call of a kernel, and what of it was wrong."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .. import _ext, xla
from ._guards import Guards, memory


_finds_late_reads = False


@contextlib.contextmanager
def finding_late_reads() -> Iterator[None]:
    """Within this context calls in checked mode tell operands that are read after the output in the same memory was written.
    For that, kernels are called where an output is not in that memory: only `check` does so, which is allowed to call them.
    """
    global _finds_late_reads
    before, _finds_late_reads = _finds_late_reads, True
    try:
        yield
    finally:
        _finds_late_reads = before


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

    def left_after_call(seed: int) -> list[tuple[np.ndarray, bool]]:
        """Return for each output which elements still hold noise, and whether that cannot be by chance."""
        for _, buffer in fresh:
            buffer._fill(seed)
        call()
        return [buffer._left(seed) for _, buffer in fresh]

    results = left_after_call(seed=1)
    problems += [f"{name} was changed" for name, buffer, before in kept if not np.array_equal(_bits(buffer), before)]
    left = [mask for mask, _ in results]
    if any(mask.any() and not sure for mask, sure in results):
        for buffer, before in aliased:
            _bits(buffer)[...] = before
        left = [first & second for first, (second, _) in zip(left, left_after_call(seed=2), strict=True)]
    for (name, buffer), mask in zip(fresh, left, strict=True):
        if mask.any():
            problems.append(f"{name}: {xla.unwritten_text(buffer, mask)}")
        elif buffer.dtype == np.bool_ and (_bits(buffer) > 1).any():
            problems.append(f"{name} has bytes other than 0 and 1, which no bool has")
    return problems + _late_reads(call, outputs, inputs, aliased)


def _late_reads(
    call: Callable[[], None],
    outputs: Sequence[_ext.Buffer],
    inputs: Sequence[_ext.Buffer],
    aliased: Sequence[tuple[_ext.Buffer, np.ndarray]],
) -> list[str]:
    """Call a kernel again with each operand that it overwrites in memory of its own. What it reads before it writes is the same
    there. Outputs are those of the call before.
    """
    if not _finds_late_reads:
        return []
    before = {output._address: bits for output, bits in aliased if not output._packed}
    overwritten = [(i, b) for i, b in enumerate(inputs) if b.size and b._address in before]
    if not overwritten:
        return []
    want = [_bits(output).copy() for output in outputs]

    def again() -> bool:
        for output in outputs:
            if output._address in before:
                _bits(output)[...] = before[output._address]
            elif output.size:
                output._fill(1)
        try:
            call()
        except Exception:
            return True  # it needs the same memory, and says so
        return all(np.array_equal(_bits(output), bits) for output, bits in zip(outputs, want, strict=True))

    places = [(b, b._address, before[b._address].copy()) for _, b in overwritten]
    try:
        for buffer, _, copy in places:
            buffer._address = copy.ctypes.data
        is_same = again()
    finally:
        for buffer, address, _ in places:
            buffer._address = address
    is_late = not is_same and again()  # else it never does the same twice
    for output, bits in zip(outputs, want, strict=True):
        _bits(output)[...] = bits
    names = ", ".join(f"input {i} ({b!r})" for i, b in overwritten)
    return [
        f"{names}: read after the output in the same memory was written: apart from each other they give another result. Read "
        "what is needed before writing"
    ] * is_late


def _bits(buffer: _ext.Buffer) -> np.ndarray:
    """The elements of `buffer` as they lie in memory, a row of bytes for each. Writeable."""
    if buffer._packed:
        return np.asarray(buffer).reshape(-1).view(np.uint8).reshape(buffer.size, buffer.dtype.itemsize)
    return memory(buffer).reshape(buffer.size, buffer.dtype.itemsize)
