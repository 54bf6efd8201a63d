"""Kernels recorded as XLA records them for a command buffer, and replayed.

XLA itself is not asked to record: of what a kernel does wrong it would report an error code of the whole program, or nothing
at all if the kernel launches elsewhere, and how many calls it records, and when, depends on its version. Here each kernel is
called alone, on a stream of its own which is captured in XLA's mode, and the driver's answer belongs to that kernel.
"""

import collections
import contextlib
import inspect
import linecache
import pathlib
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .. import xla
from ..core import callable_name
from ..debug._recorded import KernelCall, intercepted
from ._findings import Findings, NotApplicable, error_text
from ._programs import programs
from ._subject import Subject


# XLA records nothing itself: a stream cannot be captured twice.
_UNRECORDED = {"xla_gpu_graph_min_graph_size": 2**31 - 1}

_HOST_READ = (
    "reads values on the host",
    "There are none while XLA records, and each replay has others: compute with them on the GPU.",
)
_ALLOCATES = (
    "allocates",
    "A replay would use memory that is another's by then. Let XLA have it: return it as one more result. Or make it before the "
    "first call, and keep it.",
)
_WAITS = ("waits for the GPU", "Nothing runs while XLA records, and XLA orders what comes after: leave it out.")
_LOADS = (
    "compiles or loads a kernel",
    "Do so before the program runs, by a call outside of it, or by `compile()` of a cupy.RawKernel.",
)
_DEFAULT_STREAM = (
    "launches on CUDA's default stream",
    "Launch on XLA's: for CuPy inside of `with ctx:`, for others on ctx.stream.",
)
_ELSEWHERE = ("launches nothing on ctx.stream", _DEFAULT_STREAM[1])
_FORBIDDEN = (
    "does what may not be done while a stream is captured",
    "It may not allocate, wait for the GPU, read values on the host, load a kernel, or use another stream.",
)
_GOES_ON = (_FORBIDDEN[0], f"The error went unseen: check what each call of CUDA returns. {_FORBIDDEN[1]}")

# What it was, by the calls below the user's line and the text of the error. The first one that fits: a read waits as well.
_BY_CALL: Sequence[tuple[str, tuple[str, str]]] = (
    (r"DtoH|D2H|ToHost|asnumpy|tolist|array\w*\.(get|item)\b|__(float|int|bool|index|complex|array)__", _HOST_READ),
    (r"CaptureImplicit|CAPTURE_IMPLICIT|\b906\b", _DEFAULT_STREAM),
    (r"[Aa]lloc", _ALLOCATES),
    (r"[Ss]ynchroni", _WAITS),
    (r"(module|Module|library|Library)Load|[Cc]ompile", _LOADS),
)
# By the driver's code at the end of the capture, where no exception tells more.
_BY_CODE = {
    902: ("joins two captures", "Wait for events of its own streams alone."),
    904: ("leaves work on a second stream", "Let ctx.stream wait for an event of that stream at the end."),
    905: ("waits for work that is not recorded", "Wait for events that were recorded in the same call alone."),
    907: ("waits for an event that is being recorded", _WAITS[1]),
}

# As the driver numbers them.
_NODES = {0: "kernel", 1: "copy", 2: "fill", 3: "host function", 4: "graph", 5: "empty node"}
_ALLOCATION_NODES = {10, 11}  # inside of a graph in a graph, which XLA makes, they are not allowed

_LIBRARIES = ("cupy", "cupy_backends", "cuda", "numba", "torch", "jaxtyping")


class _Allocation(Exception):
    """CuPy was asked for memory: not an error of CUDA's, if its pool has some."""


def capture(subject: Subject, findings: Findings) -> None:
    """A Python kernel that says it may be recorded can be, and a replay computes what the call does."""
    if not on_gpu():
        raise NotApplicable("no GPU: nothing can be recorded")
    target = xla.python_target("cuda", True)
    counts: collections.Counter[str] = collections.Counter()
    faults: dict[str, list[str]] = {}  # and where
    is_declared, is_different = False, False
    for where, function, make in programs(subject):
        if where == "eager":
            continue  # the same kernel as compiled
        with findings.case(where):
            jitted = jax.jit(function, compiler_options=_UNRECORDED)
            if f"@{target}(" not in jitted.trace(*make()).lower(lowering_platforms=("cuda",)).as_text():
                continue
            is_declared = True
            want = jax.block_until_ready(jitted(*make()))  # first: CuPy compiles in the first call
            here: list[str] = []
            with intercepted(lambda call, here=here: _record(call, here, counts)):
                got = jax.block_until_ready(jitted(*make()))
            for fault in dict.fromkeys(here):
                faults.setdefault(fault, []).append(where)
            if not here:
                before = len(findings.faults)
                findings.close(got, want, f"{where}: a replay of what was recorded, against the call")
                is_different |= len(findings.faults) > before
    if not is_declared and not findings.faults:
        raise NotApplicable("no kernel in Python is declared command_buffer_compatible")
    for fault, places in faults.items():
        findings.fault(f"{', '.join(places)}: {fault}")
    if is_different:
        findings.notes.append(
            f"What is launched on another stream, or computed on the host, is not replayed. {_ELSEWHERE[1]}"
        )
    if counts:
        findings.notes.append("recorded " + ", ".join(_count(number, kind) for kind, number in counts.items()))


def on_gpu() -> bool:
    return xla.platform_in_use(()) == "cuda"


def _record(call: KernelCall, faults: list[str], counts: collections.Counter[str]) -> None:
    """Record a call in place of running its kernel."""
    with _no_pool():
        recording = call.record()
    fault = _fault(recording, any(buffer.size for buffer in call.outputs))
    if fault is None:
        for kind, number in recording.nodes.items():
            counts[_NODES.get(kind, "other node")] += number
        call.replay(recording)
    else:
        faults.append(f"{callable_name(call.body)} {fault}")
        call.run()  # the program goes on


def _fault(recording: Any, has_work: bool) -> str | None:
    error, code = recording.take_error(), recording.code
    if error is not None and not isinstance(error, Exception):
        raise error
    if error is not None:
        return _raised(error, is_refused=code != 0)
    if code != 0:
        sin, remedy = _BY_CODE.get(code, _GOES_ON)
        return f"{sin}: {recording.message} {remedy}"
    if _ALLOCATION_NODES & recording.nodes.keys():
        return f"{_ALLOCATES[0]} on its stream. {_ALLOCATES[1]}"
    if has_work and not recording.nodes:
        return f"{_ELSEWHERE[0]}: nothing was recorded. {_ELSEWHERE[1]}"
    return None


def _raised(error: BaseException, *, is_refused: bool) -> str:
    while (
        error.__context__ is not None and not error.__suppress_context__
    ):  # what came first; later ones follow from it
        error = error.__context__
    place, calls = _where(error)
    text = error_text(error)
    sin, remedy = "raises while it is recorded, and not otherwise", ""
    if isinstance(error, _Allocation):
        sin, remedy, text = *_ALLOCATES, str(error)
    elif isinstance(error, TypeError) and "is in the memory of a" in text:  # as our Buffers say it
        sin, remedy = _HOST_READ
    elif is_refused or "stream is capturing" in text:  # CuPy asks before it copies, and what was recorded stays good
        said = "\n".join([*calls, text])
        sin, remedy = next((named for pattern, named in _BY_CALL if re.search(pattern, said)), _FORBIDDEN)
    return f"{sin}, {place}: {text.rstrip('.')}. {remedy}".rstrip()


def _where(error: BaseException) -> tuple[str, list[str]]:
    """The user's line, and the names of the functions of libraries below it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    is_own = [frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES for frame, _ in frames]
    refuse = inspect.unwrap(_refuse).__code__  # without a check of annotations
    last = max((i for i, is_users in enumerate(is_own) if is_users and frames[i][0].f_code is not refuse), default=None)
    if last is None:
        return "in C", []
    frame, number = frames[last]
    path = frame.f_code.co_filename
    line = linecache.getline(path, number).strip()
    place = f"in line {number} of {pathlib.Path(path).name}" + (f", `{line}`" if line else "")
    return place, [frame.f_code.co_name for frame, _ in frames[last + 1 :]]


@contextlib.contextmanager
def _no_pool() -> Iterator[None]:
    """CuPy's pool gives memory without asking the driver, which would refuse: so it is refused here."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        yield
    else:
        with cupy.cuda.using_allocator(_refuse):
            yield


def _refuse(size: int) -> Any:
    raise _Allocation(f"CuPy was asked for {size} bytes")


def _count(number: int, kind: str) -> str:
    plural = "copies" if kind == "copy" else f"{kind}s"
    return f"1 {kind}" if number == 1 else f"{number} {plural}"
