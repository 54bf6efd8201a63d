"""The device's time counts: CUDA events on XLA's own stream, which a callback records.

Without CuPy, calls are chained in a loop on the device, so that the host's time does not count. Without a GPU it is the host's
clock, for a dry run.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc

from .._timing import Clock, HostClock, Runner, planned_memory


class EventClock:
    """CUDA events. Raises where there is no CuPy, or where they do not say what the host's clock says of a long program."""

    name = "CUDA events"

    def __init__(self) -> None:
        cuda: Any = importlib.import_module("cupy").cuda
        self._cuda, self._events = cuda, []

        def record(ctx: Any, out: Any, x: Any) -> None:
            event = cuda.Event()
            event.record(ctx.cupy_stream())
            self._events.append(event)

        # The operand is what has to be done before.
        mark = eqxc.buffer_callback(record, jax.ShapeDtypeStruct((), jnp.float32), has_side_effect=True)
        self._mark = jax.jit(lambda x: mark(x))
        self._check()

    def runner(self, f: Callable[..., Any], *args: Any, **jit_options: Any) -> Runner:
        jitted = jax.jit(f, **jit_options)

        def run(count: int) -> float:
            self._events.clear()
            out = self._mark(np.float32(0))
            for _ in range(count):
                out = jitted(*args)
            jax.block_until_ready(self._mark(jax.tree.leaves(out)[0]))
            start, end = self._events
            end.synchronize()
            return self._cuda.get_elapsed_time(start, end) / 1e3

        return Runner(run, lambda: jitted(*args), functools.partial(planned_memory, jitted, *args))

    def _check(self) -> None:
        x = jnp.ones((4096, 4096), jnp.bfloat16)
        product = lambda x: jax.lax.fori_loop(0, 50, lambda _, y: (x @ y) * 0.01, x)
        by_events, by_host = (clock.runner(product, x) for clock in (self, HostClock()))
        for runner in (by_events, by_host):
            runner.run(2)
        ratio = by_events.run(5) / by_host.run(5)
        if not 0.7 < ratio < 1.3:
            raise RuntimeError(f"events say {ratio:.2f} times what the host's clock says")


class LoopClock:
    """The host's clock around a loop on the device, which the host enqueues ahead of it."""

    name = "device loop"
    _STEPS = 20

    def runner(self, f: Callable[..., Any], *args: Any, **jit_options: Any) -> Runner:
        def looped(*args: Any) -> Any:
            def body(_: int, carry: Any) -> Any:
                args, _ = carry
                # Tied to the results: else XLA would take it for the same in each iteration, and compute it once.
                return jax.lax.optimization_barrier((args, f(*args)))

            like = jax.tree.map(lambda aval: jnp.zeros(aval.shape, aval.dtype), jax.eval_shape(f, *args))
            return jax.lax.fori_loop(0, self._STEPS, body, (args, like))[1]

        inner = HostClock().runner(looped, *args, **jit_options)

        def run(count: int) -> float:
            programs = -(-count // self._STEPS)
            return inner.run(programs) * count / (programs * self._STEPS)

        return Runner(run, inner.result, functools.partial(planned_memory, jax.jit(f, **jit_options), *args))


def find_clock(on_gpu: bool) -> tuple[Clock, str]:
    """The best one here, and why it is not CUDA events."""
    if not on_gpu:
        return HostClock(), "there is no GPU"
    try:
        return EventClock(), ""
    except Exception as error:  # whatever CuPy raises where it does not fit
        return LoopClock(), f"{type(error).__name__}: {error}"


def torch_runner(f: Callable[..., Any], *args: Any) -> Runner:
    torch: Any = importlib.import_module("torch")

    def run(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(count):
            f(*args)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    return Runner(run, lambda: f(*args))
