"""The smallest kernel there is as each kind of kernel, and one loop in C and in Numba."""

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc

from . import _report
from ._native import load, native_library
from ._overhead_sizes import microseconds
from ._timing import Timing, interleaved


F32 = jax.ShapeDtypeStruct((128,), jnp.float32)
BARE = "ffi_call, native add"
KINDS = "eqxcallback Op, "  # what their names begin with


@functools.cache
def bare_call() -> Callable[[jax.Array], jax.Array]:
    """Make a call as JAX's documentation does."""
    capsule = jax.ffi.pycapsule(load("native_add.cc").NativeAddOne)
    jax.ffi.register_ffi_target("benchmark_add_one", capsule, platform="cpu")
    call = jax.ffi.ffi_call("benchmark_add_one", F32)
    return lambda x: call(x)


def _add_one_in_numba(out, x):
    for i in range(x.size):
        out[i] = x[i] + np.float32(1)


def op_of(kernel: Any) -> eqxc.Op:
    return eqxc.Op("add_one", kernels={"cpu": kernel}, reference=lambda x: x + 1)


def native_kernel() -> eqxc.NativeKernel:
    return eqxc.NativeKernel("NativeAddOne", library=native_library("native_add.cc"))


def ops_of_each_kind() -> dict[str, eqxc.Op]:
    """All of them add one, without Python."""
    parameters = ("x.size", "const float* x", "float* out")
    kernels = {
        "native add": native_kernel(),
        "C function": eqxc.CKernel("plain_add_one", native_library("native_add.cc"), parameters),
        "JAX function of the ffi_call": eqxc.JaxKernel(bare_call()),
    }
    if _has("numba"):
        kernels["Numba"] = eqxc.NumbaKernel(_add_one_in_numba)
    if _has("tvm_ffi"):
        kernels["function of TVM-FFI"] = eqxc.TvmFfiKernel(_tvm_ffi_library(), "add_one")
    return {KINDS + kind: op_of(kernel) for kind, kernel in kernels.items()}


_SOFTMAX = """
#include <math.h>
#include <stdint.h>

void softmax(int64_t rows, int64_t columns, const float* x, float* out) {
  for (int64_t r = 0; r < rows; ++r, x += columns, out += columns) {
    float largest = -INFINITY, total = 0;
    for (int64_t c = 0; c < columns; ++c) largest = x[c] > largest ? x[c] : largest;
    for (int64_t c = 0; c < columns; ++c) total += out[c] = expf(x[c] - largest);
    for (int64_t c = 0; c < columns; ++c) out[c] /= total;
  }
}
"""


def _softmax_in_numba(out, x):
    for row in range(x.shape[0]):
        largest, total = np.float32(-np.inf), np.float32(0)
        for column in range(x.shape[1]):
            largest = max(largest, x[row, column])
        for column in range(x.shape[1]):
            out[row, column] = math.exp(x[row, column] - largest)
            total += out[row, column]
        for column in range(x.shape[1]):
            out[row, column] /= total


def measure_loops(rounds: int, seconds: float) -> dict[str, Timing]:
    """Seconds for the softmax of 64 rows, on one thread: the same loop, without leave to reorder it."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 512), np.float32))
    in_c = eqxc.CKernel(
        "softmax",
        source=_SOFTMAX,
        options=("-O3", "-lm"),
        parameters=("x.shape[0]", "x.shape[1]", "const float* x", "float* out"),
    )
    kernels = {"C, gcc -O3": in_c} | ({"Numba": eqxc.NumbaKernel(_softmax_in_numba)} if _has("numba") else {})
    contestants = {}
    for name, kernel in kernels.items():
        jitted = jax.jit(eqxc.Op("softmax", kernels={"cpu": kernel}, reference=lambda x: jax.nn.softmax(x)))
        np.testing.assert_allclose(jitted(x), jax.nn.softmax(x), rtol=1e-5)
        contestants[name] = lambda jitted=jitted: jitted(x).block_until_ready()
    return interleaved(contestants, rounds=rounds, round_seconds=seconds)


def report_loops(loops: dict[str, Timing]) -> str:
    first = next(iter(loops.values()))
    body = [
        [
            name,
            microseconds(t.median),
            f"{microseconds(t.low)} to {microseconds(t.high)}",
            f"{first.median / t.median:.2f}",
        ]
        for name, t in loops.items()
    ]
    return _report.table(["softmax of 64 rows of 512, as a loop", "us", "quartiles", "times as fast"], body)


def _tvm_ffi_library() -> str:
    headers: Any = importlib.import_module("tvm_ffi").libinfo
    return native_library("tvm_add.cc", *(f"-I{path}" for path in headers.include_paths()))


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
