"""The device's time counts: CUDA events on XLA's own stream, which a callback records.

Short calls are many in one program, and the device waits until the host has enqueued all of them. Without CuPy, or without a GPU
for a dry run, it is the host's clock around the same programs.
"""

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc

from .._timing import Clock, Runner, planned_memory
from .repeated import CACHE_BYTES, Repeats, nbytes, repeated


# Programs that are launched ahead of the device. XLA lets 32 be in flight: then the host waits for the device.
_MOST_PROGRAMS = 16
_MOST_RESULT_BYTES = 8 << 30
# What the host may take to launch one.
HOST_SECONDS = 300e-6
_WAIT = """
extern "C" __global__ void wait_for(const int* microseconds, float* out) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < 1000ull * microseconds[0]);
  out[0] = 0;
}
"""


def wait_op() -> eqxc.Op:
    """Keep the device busy for so many microseconds."""
    kernel = eqxc.CudaKernel(_WAIT, "wait_for", eqxc.Launch(grid=1, block=1))
    return eqxc.Op("wait_for", kernels={"cuda": kernel}, reference=lambda x: x.astype(jnp.float32) * 0)


class Stopwatch(Protocol):
    name: str

    def seconds(self, call: Callable[[], Any], count: int, *, ahead: bool) -> float:
        """Return the seconds of so many calls, without the host's if they are enqueued `ahead` of the device."""
        ...


class Events:
    """CUDA events. Raises where there is no CuPy, or where they do not say what the host's clock says of a long program."""

    name = "CUDA events"

    def __init__(self) -> None:
        cuda: Any = importlib.import_module("cupy").cuda
        self._cuda, self._events = cuda, []
        self._is_late = False
        self.cache_bytes: int = cuda.Device().attributes.get("L2CacheSize", CACHE_BYTES)

        def record(ctx: Any, out: Any, x: Any) -> None:
            if self._events:  # the end is enqueued: has the device begun before?
                self._is_late = bool(self._events[0].done)
            event = cuda.Event()
            event.record(ctx.cupy_stream())
            self._events.append(event)

        # The operand is what has to be done before.
        mark = eqxc.buffer_callback(record, jax.ShapeDtypeStruct((), jnp.float32), has_side_effect=True)
        wait = wait_op()
        self._start = jax.jit(lambda microseconds: mark(wait(microseconds)))
        self._end = jax.jit(lambda x: mark(x))
        self._check()

    def seconds(self, call: Callable[[], Any], count: int, *, ahead: bool) -> float:
        wait = HOST_SECONDS * count if ahead else 0.0
        taken = self._between_events(call, count, wait)
        for _ in range(2 if ahead else 0):
            if self._is_late:
                wait *= 2
                taken = self._between_events(call, count, wait)
        return taken

    def _between_events(self, call: Callable[[], Any], count: int, wait: float) -> float:
        self._events.clear()
        out: Any = self._start(np.int32(wait * 1e6))
        for _ in range(count):
            out = None  # its memory is the next one's: XLA writes other addresses into a graph before it launches it
            out = call()
        jax.block_until_ready(self._end(jax.tree.leaves(out)[0]))
        start, end = self._events
        end.synchronize()
        return self._cuda.get_elapsed_time(start, end) / 1e3

    def _check(self) -> None:
        x = jnp.ones((4096, 4096), jnp.bfloat16)
        product = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: (x @ y) * 0.01, x))
        taken = []
        for stopwatch in (self, Host()):
            stopwatch.seconds(lambda: product(x), 2, ahead=False)
            taken.append(stopwatch.seconds(lambda: product(x), 5, ahead=False))
        ratio = taken[0] / taken[1]
        if not 0.7 < ratio < 1.3:
            raise RuntimeError(f"events say {ratio:.2f} times what the host's clock says")


class Host:
    """The host's clock, until the last result is there."""

    name = "host"

    def seconds(self, call: Callable[[], Any], count: int, *, ahead: bool) -> float:
        out = None
        start = time.perf_counter()
        for _ in range(count):
            out = call()
        jax.block_until_ready(out)
        return time.perf_counter() - start


class Timed(NamedTuple):
    """**Attributes:**

    - `call`: a program, compiled and run once.
    - `calls`: of the contestant in it.
    - `most`: programs of one measurement, which the host enqueues before the first one begins. None: as many as are asked for,
        one after the other.
    """

    call: Callable[[], Any]
    calls: int = 1
    most: int | None = None

    def run(self, seconds: Callable[..., float], count: int) -> float:
        """Return the `seconds` of `count` calls, from those of whole programs."""
        programs = -(-count // self.calls)
        if self.most is not None:
            programs = min(programs, self.most)
        return seconds(self.call, programs, ahead=self.most is not None) * count / (programs * self.calls)


def most_programs(result_bytes: int = 0) -> int:
    """Return how many may be enqueued that have so large results, as XLA may keep all until the device has come so far."""
    return max(1, min(_MOST_PROGRAMS, _MOST_RESULT_BYTES // max(result_bytes, 1)))


class RepeatingClock:
    """Short calls are many in one program, recorded into a command buffer. Options of `jax.jit` say how a call is to be run: with
    them it is timed as it is."""

    def __init__(self, stopwatch: Stopwatch, repeats: Repeats) -> None:
        self.name = stopwatch.name
        self._stopwatch, self._repeats = stopwatch, repeats

    def runner(self, f: Callable[..., Any], *args: Any, **jit_options: Any) -> Runner:
        jitted = jax.jit(f, **jit_options)

        def call() -> Any:
            return jitted(*args)

        @functools.cache
        def timed() -> Timed:
            result_bytes = nbytes(jax.block_until_ready(call()))
            if jit_options:
                return Timed(call)
            return self._repeated(f, args, call, result_bytes)

        temporary = functools.partial(planned_memory, jitted, *args)
        return Runner(lambda count: timed().run(self._stopwatch.seconds, count), call, temporary)

    def _repeated(
        self, f: Callable[..., Any], args: tuple[Any, ...], call: Callable[[], Any], result_bytes: int
    ) -> Timed:
        self._stopwatch.seconds(call, 1, ahead=True)  # which compiles what marks the end of such a result
        once = self._stopwatch.seconds(call, 3, ahead=True) / 3
        if once >= self._repeats.below:
            return Timed(call)
        calls = self._repeats.calls(once, result_bytes)
        try:
            captured = dict(eqxc.jit_captured(lambda: None).compiler_options)
            program = jax.jit(repeated(f, calls), compiler_options=captured)
            sets = self._repeats.operand_sets(args, calls)
            jax.block_until_ready(program(sets))
            return Timed(lambda: program(sets), calls, most_programs(calls * result_bytes))
        except Exception as error:  # a call that cannot be recorded is a contestant nonetheless
            print(
                f"{calls} calls in one program: {type(error).__name__}: {str(error)[:300]}; timed one by one",
                flush=True,
            )
            return Timed(call, most=most_programs(result_bytes))


def find_clock(on_gpu: bool) -> tuple[Clock, str]:
    """The best one here, and why it is not CUDA events."""
    if not on_gpu:
        # Every path once, but a step of training: two take long to compile. Each call has operands of its own, without which XLA
        # for CPUs would merge them.
        dry = Repeats(below=1e-3, fewest=2, most=2, cache_bytes=float("inf"))
        return RepeatingClock(Host(), dry), "there is no GPU"
    try:
        events = Events()
        return RepeatingClock(events, Repeats(cache_bytes=events.cache_bytes)), ""
    except Exception as error:  # whatever CuPy raises where it does not fit
        return RepeatingClock(Host(), Repeats()), f"{type(error).__name__}: {error}"
