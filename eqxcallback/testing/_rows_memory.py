"""Check what kernels do to memory: outputs, inputs, and what they keep."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import debug
from ..core import raising
from ..debug._compare import finding_late_reads
from ._findings import Findings, NotApplicable, error_text, host, unwritten_aside
from ._programs import Program, few_programs, may_call_kernels, programs
from ._subject import Subject, is_native


_PATTERNS = (0xA5, 0x5A)
# What checked mode says, by the row that it belongs to.
_WRITTEN = "never written", "bytes other than"
_CHANGED = ("was changed",)
_BEYOND = "its memory were overwritten", "its memory, and crashed"
_ENDED = "the kernel crashed", "the kernel ended the process", "the kernel did not end", "threw a C++ exception"
_LATE = ("apart from each other they give",)
_IGNORED = ("reads none of its attributes",)
_KEPT = ("was kept past the call",)

_Row = Callable[[Subject, Findings, Sequence[Program]], None]


def overruns(subject: Subject) -> list[str]:
    """Find kernels that write beyond what they are given, or end their process. In checked mode neither harms anything. All other
    faults are for the rows to report.
    """
    if not has_checked_mode():
        return []
    faults: list[str] = []
    with contextlib.suppress(Exception):  # each program alone says where it is
        if not may_call_kernels(subject):
            return []
        for _, function, make in few_programs(subject):
            _checked(function, make)
        return []
    with contextlib.suppress(Exception):  # wrong types have no programs
        for where, function, make in programs(subject):
            try:
                _checked(function, make)
            except Exception as error:
                faults += [f"{where}: {problem}" for problem in _problems(error, _BEYOND + _ENDED)]
    return faults


def _of_few_programs(row: _Row) -> Callable[[Subject, Findings], None]:
    """A row of all programs. Most kernels are right, and a few programs compile in less time: if anything is wrong in one of
    them, each program runs alone, to say in which one it is.
    """

    @functools.wraps(row)
    def of_subject(subject: Subject, findings: Findings) -> None:
        found = Findings(findings.tolerance)
        errors: list[Exception] = []  # the row may pass over them: they can be for another row to tell
        try:
            row(subject, found, [_recording(errors, program) for program in few_programs(subject)])
        except NotApplicable:
            if not errors:
                findings.worst = found.worst
                raise
        except Exception as error:
            errors.append(error)
        if errors or found.faults:
            row(subject, findings, programs(subject))
        else:
            findings.worst, findings.notes = found.worst, found.notes

    return of_subject


def _recording(errors: list[Exception], program: Program) -> Program:
    name, function, make = program

    def call(*arrays: Any) -> Any:
        try:
            return jax.block_until_ready(function(*arrays))
        except Exception as error:
            errors.append(error)
            raise

    return name, call, make


@_of_few_programs
def inputs_untouched(subject: Subject, findings: Findings, every: Sequence[Program]) -> None:
    """No kernel writes to an input that it has not declared to overwrite. That none writes beyond what it is given was found
    out before.
    """
    for where, function, make in every:
        arrays = make()
        before = [host(array) for array in arrays]
        names = [*(operand.name for operand in subject.operands), *["a cotangent"] * len(arrays)]
        with findings.case(where):
            with unwritten_aside():
                jax.block_until_ready(function(*arrays))
            for name, array, want in zip(names, arrays, before, strict=False):
                findings.same_bits([array], [want], f"{where}: {name} after the call")
    _in_checked_mode(findings, every, _CHANGED)


@_of_few_programs
def outputs_written(subject: Subject, findings: Findings, every: Sequence[Program]) -> None:
    """Kernels write every element of every output, and do not read what is there before."""
    if subject.is_known and subject.kernel is None:
        raise NotApplicable(f"no kernel for {jax.default_backend()}: XLA writes them")
    if has_checked_mode():
        for where, got, want in _in_checked_mode(findings, every, _WRITTEN):
            findings.close(got, want, f"{where}: outputs that held other values before")
    if not has_checked_mode() or not subject.is_known:  # a function may call handlers that are not ours
        _in_donated_memory(subject, findings)


@_of_few_programs
def late_reads(subject: Subject, findings: Findings, every: Sequence[Program]) -> None:
    """No kernel reads an operand after the result that overwrites it was written."""
    if subject.is_known and not subject.aliases:
        raise NotApplicable("nothing is overwritten")
    with finding_late_reads():
        _in_checked_mode(findings, every, _LATE)


@_of_few_programs
def attributes(subject: Subject, findings: Findings, every: Sequence[Program]) -> None:
    """Native kernels read the attributes that they are given. XLA counts those of handlers that bind any by name, and
    ignores what it gives to others.
    """
    if not is_native(subject.kernel):
        raise NotApplicable("no native kernel: Python checks the options of others")
    _in_checked_mode(findings, every, _IGNORED)


@_of_few_programs
def buffers_released(subject: Subject, findings: Findings, every: Sequence[Program]) -> None:
    """No kernel keeps a Buffer, or an array over one, past its call."""
    if is_native(subject.kernel):
        raise NotApplicable("a native kernel has no Buffers")
    _in_checked_mode(findings, every, _KEPT)


def aliasing(subject: Subject, findings: Findings) -> None:
    """Inputs that results overwrite are unchanged unless they are donated, and the results are right in any case."""
    if not subject.is_known:
        raise NotApplicable("a function does not say what it overwrites")
    if not subject.aliases:
        raise NotApplicable("nothing is overwritten")
    reference = subject.jitted if subject.reference is None else subject.jitted_reference
    want = [host(array) for array in reference(*subject.arrays())]
    donating = jax.jit(subject.call, donate_argnums=tuple(range(len(subject.operands))))
    for where, function in (("eager", subject.call), ("compiled", subject.jitted), ("donated", donating)):
        with findings.case(where), _unused_donations():
            arrays = subject.arrays()
            before = [host(array) for array in arrays]
            findings.close(function(*arrays), want, where)
            if where != "donated":
                findings.same_bits(arrays, before, f"{where}: inputs after the call")


def _in_checked_mode(findings: Findings, every: Sequence[Program], texts: Sequence[str]) -> list[tuple[str, Any, Any]]:
    """Faults of one kind alone. Returns what ran, the results, and those without checked mode."""
    if not has_checked_mode():
        raise NotApplicable("checked mode is of CPUs")
    results = []
    for where, function, make in every:
        try:
            got = _checked(function, make)
            with raising():
                results.append((where, got, [host(array) for array in function(*make())]))
        except Exception as error:
            if not _problems(error):
                findings.fault(f"{where}: {error_text(error)}")
            for problem in _problems(error, texts):
                findings.fault(f"{where}: {problem}")
    return results


def has_checked_mode() -> bool:
    return jax.default_backend() == "cpu"


def _checked(function: Any, make: Callable[[], list[Any]]) -> list[np.ndarray]:
    with raising(), debug.checked():
        return [host(array) for array in function(*make())]


def _problems(error: Exception, texts: Sequence[str] = ("",)) -> list[str]:
    """Return the problems that checked mode reports, if they contain one of `texts`."""
    _, _, faults = str(getattr(error, "original", error)).partition("checked mode found: ")
    return [problem for problem in faults.split("; ") if problem and any(text in problem for text in texts)]


def _in_donated_memory(subject: Subject, findings: Findings) -> None:
    """Check outputs that cannot be filled before a call: filled arrays are donated, so that the results take their memory."""
    is_used = False
    for where, function, make in programs(subject):
        if where in ("compiled", "vmap"):
            with findings.case(where):
                is_used |= _into_donated(findings, where, function, make)
    if not is_used and not findings.faults:
        raise NotApplicable("XLA put no result where an array was donated")
    findings.notes.append("compiled calls alone, into donated memory")


def _into_donated(
    findings: Findings, where: str, function: Callable[..., object], make: Callable[[], list[Any]]
) -> bool:
    """True if any result took the memory of a donated array."""
    types = jax.eval_shape(function, *make())
    if any(jax.dtypes.issubdtype(type.dtype, jax.dtypes.prng_key) for type in types):
        return False
    jitted = jax.jit(lambda donated, *arrays: function(*arrays), donate_argnums=0, keep_unused=True)
    untouched = [np.ones(type.shape, bool) for type in types]
    used = [bool(type.size) for type in types]
    for pattern in _PATTERNS:
        donated = [_filled(type, pattern) for type in types]
        places = [array.unsafe_buffer_pointer() for array in donated]
        with _unused_donations():
            outs = jax.block_until_ready(jitted(donated, *make()))
        for i, out in enumerate(outs):
            used[i] &= out.unsafe_buffer_pointer() in places
            bits = host(out).reshape(-1).view(np.uint8).reshape(out.size, out.dtype.itemsize)
            untouched[i] &= (bits == pattern).all(axis=1).reshape(out.shape)
    for i, mask in enumerate(untouched):
        if used[i] and mask.any():
            first = tuple(int(j) for j in np.argwhere(mask)[0])
            count = f"{int(mask.sum())} of {mask.size}"
            findings.fault(f"{where}: result {i}: {count} elements were never written, the first at {first}")
    return any(used)


def _filled(type: Any, pattern: int) -> jax.Array:
    bits = np.full((int(np.prod(type.shape)), type.dtype.itemsize), pattern, np.uint8)
    return jnp.array(bits.reshape(-1).view(type.dtype).reshape(type.shape), copy=True)


@contextlib.contextmanager
def _unused_donations() -> Iterator[None]:
    """JAX warns of donated arrays that no result can overwrite: all of them are donated here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield
