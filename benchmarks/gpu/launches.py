"""Measure a launch's cost on the host: chains of kernels on f32[128] in one program, recorded into a command buffer and not."""

import ctypes
import functools
import importlib
import itertools
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback as jax_buffer_callback

import eqxcallback as eqxc

from .._empty import empty, empty_but_first
from .._native import folder
from .._rows import OURS, Goal, Row, Setting
from .._timing import Runner, waited_for


CALLS = 100
SIZE = 128
F32 = jax.ShapeDtypeStruct((SIZE,), jnp.float32)

NOT_CAPTURED = {"xla_gpu_enable_command_buffer": ""}

_HANDLER = """
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error nothing(void*, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Success(); }
XLA_FFI_DEFINE_HANDLER_SYMBOL(Nothing, nothing,
                              ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});
"""


def add_one_op() -> eqxc.Op:
    source = """
    extern "C" __global__ void add_one(const float* x, float* out) { out[threadIdx.x] = x[threadIdx.x] + 1; }
    """
    kernel = eqxc.CudaKernel(source, "add_one", eqxc.Launch(grid=1, block=SIZE))
    return eqxc.Op("add_one", kernels={"cuda": kernel}, reference=lambda x: x + 1)


@functools.cache
def bare_call() -> Callable[[jax.Array], jax.Array]:
    """A handler as JAX's documentation has it, that launches nothing: what XLA and its FFI take themselves."""
    source, library = folder() / "nothing.cc", str(folder() / "nothing.so")
    source.write_text(_HANDLER)
    include = f"-I{jax.ffi.include_dir()}"
    subprocess.run(
        ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-w", include, str(source), "-o", library],
        check=True,
    )
    capsule = jax.ffi.pycapsule(ctypes.CDLL(library).Nothing)
    jax.ffi.register_ffi_target("benchmark_nothing", capsule, platform="CUDA")
    call = jax.ffi.ffi_call("benchmark_nothing", F32)
    return lambda x: call(x)


def with_cupy(ctx: Any, out: Any, x: Any) -> None:
    cupy: Any = importlib.import_module("cupy")
    with cupy.cuda.ExternalStream(ctx.stream):
        cupy.add(cupy.asarray(x), 1, out=cupy.asarray(out))


def with_numpy(ctx: Any, out: Any, x: Any) -> None:
    np.add(np.asarray(x), 1, out=np.asarray(out))


def contestants(tiny: bool) -> dict[str, Callable[[], Callable[[jax.Array], jax.Array]]]:
    add = with_numpy if tiny else with_cupy
    made: dict[str, Callable[[], Callable[[jax.Array], jax.Array]]] = {
        OURS: add_one_op,
        "ffi_call, no launch": bare_call,
        "XLA, x + 1": lambda: lambda x: jax.lax.optimization_barrier(x + 1),
        "eqxcallback, empty Python": lambda: _ours(empty_but_first() if tiny else empty),
        "jax buffer_callback, empty": lambda: _theirs(empty),
        "eqxcallback, CuPy": lambda: _ours(add),
        "jax buffer_callback, CuPy": lambda: _theirs(add),
    }
    if tiny:  # its handler is for CUDA
        del made["ffi_call, no launch"]
    return made


def _ours(body: Callable[..., None]) -> Callable[[jax.Array], jax.Array]:
    return eqxc.buffer_callback(body, F32, command_buffer_compatible=True)


def _theirs(body: Callable[..., None]) -> Any:
    return jax_buffer_callback(body, F32, command_buffer_compatible=True)


def measure(setting: Setting) -> Iterator[Row]:
    calls = 4 if setting.tiny else CALLS
    captured = eqxc.jit_captured(lambda x: x).compiler_options
    kinds = {
        "not captured": (NOT_CAPTURED, 1),
        "captured": (captured, 1),
        # XLA writes new addresses into the graph before each replay.
        "captured, operands that move": (captured, 2),
    }
    for what, (options, operands) in kinds.items():
        if not setting.has_time():
            return
        runners = {
            name: functools.partial(_chain, make, calls, dict(options), operands)
            for name, make in contestants(setting.tiny).items()
        }
        race = setting.race(runners)
        race.differences.clear()  # an empty body writes nothing
        yield Row(f"a launch in a chain of {calls}, {what}", "us", calls, race, (Goal(3.0),))


def _chain(
    make: Callable[[], Callable[[jax.Array], jax.Array]], calls: int, options: dict[str, Any], operands: int
) -> Runner:
    """The operands take turns."""
    call = make()

    def program(x: jax.Array) -> jax.Array:
        for _ in range(calls):
            x = call(x)
        return x

    jitted = jax.jit(program, compiler_options=options)
    given = itertools.cycle([jnp.zeros(SIZE) for _ in range(operands)])
    # The host's time is what is asked for: it waits for each program.
    return waited_for(lambda: jax.block_until_ready(jitted(next(given))))
