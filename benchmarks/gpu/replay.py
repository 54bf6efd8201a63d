"""Observe the host while XLA records and replays: `python -m benchmarks.gpu.replay EXPERIMENT --to FILE`.

How often Python runs; in which context a kernel is loaded and launched; and what a callback does to a recording that raises,
allocates, waits, or launches elsewhere. Each experiment is for a process of its own: one that spoils the context ends alone.
"""

import argparse
import ctypes
import importlib
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback as jax_buffer_callback

import eqxcallback as eqxc


SIZE = 1 << 16
F32 = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
SMALLEST = "xla_gpu_graph_min_graph_size"

_has_gpu = False


def add_one(ctx: Any, out: Any, x: Any) -> None:
    """Add one on XLA's stream. Without a GPU NumPy stands in."""
    if not _has_gpu:
        np.add(np.asarray(x), 1, out=np.asarray(out))
        return
    cupy: Any = importlib.import_module("cupy")
    with cupy.cuda.ExternalStream(ctx.stream):
        cupy.add(cupy.asarray(x), 1, out=cupy.asarray(out))


def repeated(call: Callable[[jax.Array], jax.Array], times: int) -> Callable[[jax.Array], jax.Array]:
    def program(x: jax.Array) -> jax.Array:
        for _ in range(times):
            x = call(x)
        return x

    return program


def counts() -> dict[str, Any]:
    """Count the runs of Python for each call of a program: six times with the same buffers, then with six others."""
    by_name: dict[str, Any] = {}
    for library, make in (("eqxcallback", eqxc.buffer_callback), ("jax", jax_buffer_callback)):
        for times in (1, 2, 5, 8):
            for smallest in (None, 1):
                name = f"{library}, run of {times}, smallest {'default' if smallest is None else smallest}"
                try:
                    by_name[name] = _count(make, times, {} if smallest is None else {SMALLEST: smallest})
                except Exception as error:
                    by_name[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return by_name


def _count(make: Callable[..., Any], times: int, options: dict[str, Any]) -> dict[str, Any]:
    runs = [0]

    def body(ctx: Any, out: Any, x: Any) -> None:
        runs[0] += 1
        add_one(ctx, out, x)

    call = make(body, F32, command_buffer_compatible=True)
    program = jax.jit(repeated(call, times), compiler_options=options)
    kept = [jnp.full(SIZE, float(i)) for i in range(7)]  # alive together, so at different addresses
    per_call, right = [], True
    for i in range(12):
        x = kept[0] if i < 6 else kept[i - 5]
        runs[0] = 0
        y = np.asarray(program(x))
        per_call.append(runs[0])
        right &= bool((y == (0 if i < 6 else i - 5) + times).all())
    return {"python_runs": per_call, "right": right}


def context() -> dict[str, Any]:
    """A kernel that was never loaded is launched first while XLA records. Where the context at that time is not the one in
    which its image was loaded before, it would be loaded there and then, which is refused."""
    source = """
    // Never loaded before.
    extern "C" __global__ void add_one(const float* x, float* out, int n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) out[i] = x[i] + 1;
    }"""
    launch = eqxc.Launch(grid=lambda x: -(-x.size // 256), block=256)
    kernel = eqxc.CudaKernel(source, "add_one", launch, scalars={"n": ("int32", lambda x: x.size)})
    op = eqxc.Op("add_one", kernels={"cuda": kernel}, reference=lambda x: x + 1)
    program = eqxc.jit_captured(lambda x: op(x))
    report = eqxc.inspect(program, jnp.zeros(SIZE))
    right = [bool((np.asarray(program(jnp.full(SIZE, float(i)))) == i + 1).all()) for i in range(4)]
    facts: dict[str, Any] = {"captured": [call.captured for call in report.calls], "right": right}
    if not _has_gpu:
        return facts
    driver = ctypes.CDLL("libcuda.so.1")
    seen = []

    def look(ctx: Any, out: Any, x: Any) -> None:
        current, device = ctypes.c_void_p(), ctypes.c_int()
        codes = driver.cuCtxGetCurrent(ctypes.byref(current)), driver.cuCtxGetDevice(ctypes.byref(device))
        status = ctypes.c_int(-1)
        codes += (driver.cuStreamIsCapturing(ctypes.c_void_p(ctx.stream), ctypes.byref(status)),)
        seen.append({"context": current.value, "device": device.value, "capturing": status.value, "codes": codes})
        add_one(ctx, out, x)

    looking = eqxc.buffer_callback(look, F32, command_buffer_compatible=True)
    for f in (jax.jit(looking), eqxc.jit_captured(lambda x: looking(x))):
        jax.block_until_ready(f(jnp.zeros(SIZE)))
    primary = ctypes.c_void_p()
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(primary), 0)
    return {**facts, "primary_context": primary.value, "seen": seen}


def types() -> dict[str, Any]:
    """Say what CuPy makes of our buffers and of JAX's, 16 bits among them."""
    by_name: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16", "float16", "float8_e4m3fn", "bool"):
        for library, make in (("eqxcallback", eqxc.buffer_callback), ("jax", jax_buffer_callback)):
            seen = by_name.setdefault(f"{library}, {dtype}", {})

            def look(ctx: Any, out: Any, x: Any, seen: dict[str, Any] = seen) -> None:
                seen["interface"] = str(getattr(x, "__cuda_array_interface__", {}).get("typestr"))
                if hasattr(x, "cupy") and _has_gpu:
                    seen["cupy"] = str(x.cupy().dtype)

            x = jnp.ones(8, dtype)
            try:
                jax.block_until_ready(make(look, jax.ShapeDtypeStruct(x.shape, x.dtype))(x))
            except Exception as error:
                seen["error"] = f"{type(error).__name__}: {str(error)[-300:]}"
    return by_name


def raising() -> dict[str, Any]:
    def body(ctx: Any, out: Any, x: Any) -> None:
        raise ValueError("planted")

    return _misbehaving(body)


def allocating() -> dict[str, Any]:
    """Allocate from a pool that has nothing yet, and so from the driver."""

    def body(ctx: Any, out: Any, x: Any) -> None:
        cupy: Any = importlib.import_module("cupy")
        cupy.get_default_memory_pool().free_all_blocks()
        with cupy.cuda.ExternalStream(ctx.stream):
            sums = cupy.empty(SIZE, cupy.float32)
            cupy.add(cupy.asarray(x), 1, out=sums)
            cupy.copyto(cupy.asarray(out), sums)

    return _misbehaving(body)


def waiting() -> dict[str, Any]:
    def body(ctx: Any, out: Any, x: Any) -> None:
        cupy: Any = importlib.import_module("cupy")
        add_one(ctx, out, x)
        cupy.cuda.ExternalStream(ctx.stream).synchronize()

    return _misbehaving(body)


def elsewhere() -> dict[str, Any]:
    """Launch on CuPy's own current stream, which is CUDA's default one."""

    def body(ctx: Any, out: Any, x: Any) -> None:
        cupy: Any = importlib.import_module("cupy")
        cupy.add(cupy.asarray(x), 1, out=cupy.asarray(out))

    return _misbehaving(body)


def _misbehaving(body: Callable[..., None]) -> dict[str, Any]:
    """Say what is raised, in which of two calls, whether results are right, and whether a well-behaved program still runs."""
    if not _has_gpu and body.__qualname__.split(".")[0] != "raising":
        return {"left_out": "needs a GPU"}
    callback = eqxc.buffer_callback(body, F32, command_buffer_compatible=True)
    program = eqxc.jit_captured(lambda x: callback(callback(x)))
    outcome: dict[str, Any] = {"calls": []}
    for i in range(3):
        try:
            right = bool((np.asarray(program(jnp.full(SIZE, float(i)))) == i + 2).all())
            outcome["calls"].append("right" if right else "WRONG")
        except Exception as error:
            outcome["calls"].append(f"{type(error).__name__}: {str(error)[:600]}")
    try:
        good = eqxc.buffer_callback(add_one, F32, command_buffer_compatible=True)
        after = eqxc.jit_captured(lambda x: good(good(x)))(jnp.zeros(SIZE))
        outcome["after"] = "right" if bool((np.asarray(after) == 2).all()) else "WRONG"
    except Exception as error:
        outcome["after"] = f"{type(error).__name__}: {str(error)[:300]}"
    return outcome


EXPERIMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    experiment.__name__: experiment for experiment in (counts, context, types, raising, allocating, waiting, elsewhere)
}


def main() -> int:
    global _has_gpu
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", choices=list(EXPERIMENTS))
    parser.add_argument("--to", type=pathlib.Path, required=True)
    options = parser.parse_args()
    _has_gpu = jax.default_backend() == "gpu"
    record = {"platform": jax.default_backend(), **EXPERIMENTS[options.experiment]()}
    options.to.write_text(json.dumps(record))
    print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
