"""Run a program under JAX's profiler, and read which of XLA's thunks ran when."""

import dataclasses
import pathlib
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax


_RUN = "eqxcallback.inspect: a run"


@dataclasses.dataclass(frozen=True)
class Event:
    """A thunk that ran. Times are seconds since its run began.

    **Attributes:**

    - `instruction`: the name of the instruction that it is of.
    - `thread`: of those that started thunks of this run, by its index.
    - `device`: the ordinal of the device.
    """

    instruction: str
    start: float
    end: float
    thread: int
    device: int


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a program, from its call until its results are there."""

    seconds: float
    events: tuple[Event, ...]


def timed_runs(run: Callable[[], Callable[[], object]], repeats: int) -> list[float]:
    """Return the seconds of each of so many runs. `run` prepares one, and returns what is to be timed."""
    times = []
    for _ in range(repeats):
        call = run()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def profiled_runs(run: Callable[[], Callable[[], object]], repeats: int, module: str) -> list[Run]:
    """The same under the profiler. `module` is XLA's name of the program: kernels may run other ones."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.enable_hlo_proto = False
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(repeats):
                call = run()
                with jax.profiler.TraceAnnotation(_RUN):
                    call()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_serialized_xspace(path.read_bytes())
    with warnings.catch_warnings():
        # Python 3.12 warns of types that jaxlib makes here, and jaxlib ends the process if a warning is an error.
        warnings.filterwarnings("ignore", "builtin type .* has no __module__ attribute", DeprecationWarning)
        return list(_runs(data, module))


def _runs(data: Any, module: str) -> Iterator[Run]:
    """Read the runs in their order, from a `jax.profiler.ProfileData`."""
    thunks: list[_Thunk] = []
    runs, ends = [], {}
    for line, events in enumerate(line.events for plane in data.planes for line in plane.lines):
        for event in events:
            if event.name == _RUN:
                runs.append((event.start_ns, event.end_ns))
            elif event.name.startswith("end: "):
                ends[dict(event.stats).get("_c")] = event.start_ns
            elif (stats := dict(event.stats)).get("hlo_module") == module:
                thunks.append(_Thunk(stats, event.start_ns, event.end_ns, line))
    thunks.sort(key=lambda thunk: thunk.start)
    for start, end in sorted(runs):
        during = [thunk for thunk in thunks if start <= thunk.start < end]
        # Another program of this name, which a kernel runs, has begun later.
        during = [thunk for thunk in during if thunk.program == during[0].program]
        lines = list(dict.fromkeys(thunk.line for thunk in during))
        events = tuple(_event(thunk, ends, start, end, lines.index(thunk.line)) for thunk in during)
        yield Run((end - start) * 1e-9, events)


@dataclasses.dataclass(frozen=True)
class _Thunk:
    stats: Mapping[str, Any]
    start: float
    end: float
    line: int

    @property
    def program(self) -> Any:
        return self.stats.get("program_id")


def _event(thunk: _Thunk, ends: Mapping[Any, float], start: float, end: float, thread: int) -> Event:
    # A thunk may have only begun when the thread that started it goes on: another event says when it has ended.
    last = min(end, max(thunk.end, ends.get(thunk.stats.get("_p"), 0.0)))
    name, device = str(thunk.stats["hlo_op"]), int(thunk.stats.get("device_ordinal", 0))
    return Event(name, (thunk.start - start) * 1e-9, (last - start) * 1e-9, thread, device)
