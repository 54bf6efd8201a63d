"""What kernels do to memory: outputs, inputs, and what they keep."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import debug
from .._errors import raising
from ._findings import Findings, NotApplicable, error_text, host
from ._subject import Subject, is_native


_PATTERNS = (0xA5, 0x5A)
_TRIES = 6
# What checked mode says, by the row that it belongs to.
_WRITTEN, _CHANGED, _KEPT = ("never written", "bytes other than"), ("was changed",), ("was kept past the call",)


def inputs_untouched(subject: Subject, found: Findings) -> None:
    """No kernel writes to an input that it has not declared to overwrite."""
    for where, function, arrays in _programs(subject):
        before = [host(array) for array in arrays]
        with found.case(where):
            jax.block_until_ready(function(*arrays))
            for operand, array, want in zip(subject.operands, arrays, before, strict=False):
                found.same_bits([array], [want], f"{where}: {operand.name} after the call")
    _in_checked_mode(subject, found, _CHANGED)


def outputs_written(subject: Subject, found: Findings) -> None:
    """Kernels write every element of every output, and do not read what is there before."""
    if is_native(subject.kernel) or jax.default_backend() != "cpu":
        return _in_reused_memory(subject, found)
    for where, got, want in _in_checked_mode(subject, found, _WRITTEN):
        found.close(got, want, f"{where}: outputs that held other values before")


def buffers_released(subject: Subject, found: Findings) -> None:
    """No kernel keeps a Buffer, or an array over one, past its call."""
    if is_native(subject.kernel):
        raise NotApplicable("a native kernel has no Buffers")
    _in_checked_mode(subject, found, _KEPT)


def aliasing(subject: Subject, found: Findings) -> None:
    """Inputs that results overwrite are unchanged unless they are donated, and the results are right in any case."""
    if subject.aliases is None:
        raise NotApplicable("a function does not say what it overwrites")
    if not subject.aliases:
        raise NotApplicable("nothing is overwritten")
    definition = subject.jitted if subject.reference is None else subject.jitted_reference
    want = [host(array) for array in definition(*subject.arrays())]
    donating = jax.jit(subject.call, donate_argnums=tuple(range(len(subject.operands))))
    for where, function in (("eager", subject.call), ("compiled", subject.jitted), ("donated", donating)):
        with found.case(where), _unused_donations():
            arrays = subject.arrays()
            before = [host(array) for array in arrays]
            found.close(function(*arrays), want, where)
            if where != "donated":
                found.same_bits(arrays, before, f"{where}: inputs after the call")


def _programs(subject: Subject) -> Iterator[tuple[str, Any, list[Any]]]:
    """Every kernel there is: forward and backward, and as `vmap` calls them. The operands come first."""
    yield "eager", subject.call, subject.arrays()
    yield "compiled", subject.jitted, subject.arrays()
    mapped = [operand.stack([operand.example(number) for number in range(3)]) for operand in subject.operands]
    if mapped:
        yield "vmap", jax.vmap(subject.call), mapped
    with contextlib.suppress(NotApplicable):
        subject.need_reverse()
        arrays = [*subject.arrays(), *subject.cotangents()]
        yield "gradient", _of_flat(subject, subject.pullback), arrays
        yield (
            "vmap of the gradient",
            _of_flat(subject, subject.mapped_pullback),
            [*mapped, *[jnp.stack([ct] * 3) for ct in subject.cotangents()]],
        )


def _of_flat(subject: Subject, gradient: Any) -> Any:
    count = len(subject.operands)
    return lambda *arrays: gradient(arrays[:count], arrays[count:])


def _in_checked_mode(subject: Subject, found: Findings, texts: Sequence[str]) -> list[tuple[str, Any, Any]]:
    """Faults of one kind alone. Returns what ran, the results, and those without checked mode."""
    if jax.default_backend() != "cpu":
        raise NotApplicable("checked mode is of CPUs")
    results = []
    for where, function, arrays in _programs(subject):
        try:
            with raising():
                want = [host(array) for array in function(*arrays)]
                with debug.checked():
                    got = [host(array) for array in function(*arrays)]
            results.append((where, got, want))
        except Exception as error:
            original = getattr(error, "original", error)
            message = str(original)
            if "checked mode found: " not in message:
                found.fault(f"{where}: {error_text(error)}")
                continue
            problems = message.split("checked mode found: ")[1].split("; ")
            for problem in problems:
                if any(text in problem for text in texts):
                    found.fault(f"{where}: {problem}")
    return results


def _in_reused_memory(subject: Subject, found: Findings) -> None:
    """Where outputs cannot be filled before a call: memory is, and given back, in the hope that the call gets it."""
    types = subject.result_types
    untouched = [np.ones(type.shape, bool) for type in types]
    met: list[set[int]] = [set() for _ in types]
    for pattern in _PATTERNS * _TRIES:
        for i, out in enumerate(_call_after(subject, pattern, types)):
            if out is not None:
                untouched[i] &= (out == pattern).all(axis=1).reshape(types[i].shape)
                met[i].add(pattern)
    sizes = [mask.size for mask in untouched]
    if not any(patterns == set(_PATTERNS) for patterns in met):
        raise NotApplicable("a native kernel, and XLA gave its outputs no memory that was filled before")
    for i, (mask, patterns) in enumerate(zip(untouched, met, strict=True)):
        if patterns == set(_PATTERNS) and mask.any():
            first = tuple(int(j) for j in np.argwhere(mask)[0])
            found.fault(
                f"result {i}: {int(mask.sum())} of {sizes[i]} elements were never written, the first at {first}"
            )
    found.notes.append("in memory that was filled before")


def _call_after(subject: Subject, pattern: int, types: Sequence[Any]) -> list[np.ndarray | None]:
    """The bytes of each result, a row for each element, if it is where memory was filled with `pattern` before."""
    arrays = jax.block_until_ready(subject.arrays())
    counts = [int(np.prod(type.shape)) * np.dtype(type.dtype).itemsize for type in types]
    filled = jax.block_until_ready([jnp.full((count,), pattern, jnp.uint8) for count in (*counts, *counts)])
    places = {array.unsafe_buffer_pointer() for array in filled if array.size}
    for array in filled:
        array.delete()
    outs = jax.block_until_ready(subject.jitted(*arrays))
    return [
        host(out).reshape(-1).view(np.uint8).reshape(out.size, -1)
        if count and out.unsafe_buffer_pointer() in places
        else None
        for out, count in zip(outs, counts, strict=True)
    ]


@contextlib.contextmanager
def _unused_donations() -> Iterator[None]:
    """JAX warns of donated arrays that no result can overwrite: all of them are donated here."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield
