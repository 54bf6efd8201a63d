"""A user's kernels on a real GPU: compiled for it, launched without Python, saved, found again, and what failures say."""

import functools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import xla

from ..persistent_cache import COUNT_HITS
from . import saxpy
from .conftest import require_gpu


pytestmark = pytest.mark.gpu

require_gpu()


F32 = jax.ShapeDtypeStruct((1000,), jnp.float32)
# Where the programs of other processes find this package and saxpy.py.
FOLDERS = pathlib.Path(__file__).parents[2], pathlib.Path(__file__).parent


@pytest.fixture
def xy():
    x = jnp.arange(1000.0)
    return x, jnp.sin(x)


def one(source, **changed):
    """An op of one operand, with a kernel `entry` in CUDA C++."""
    fields = {"entry": "entry", "launch": eqxc.Launch(grid=1, block=32), "out_type": lambda x, **_: x}
    return eqxc.Op("one", kernels={"cuda": eqxc.CudaKernel(source, **{**fields, **changed})})


def test_what_can_run_here():
    backends = eqxc.available_backends()
    assert (backends["cuda"], backends["triton"]) == (True, True)


@pytest.mark.parametrize("jit", [True, False])
def test_values(xy, jit):
    f = functools.partial(saxpy.op(), a=3.0)
    np.testing.assert_allclose((jax.jit(f) if jit else f)(*xy), 3 * np.asarray(xy[0]) + np.asarray(xy[1]), rtol=1e-6)


def test_gradients_and_batches(xy):
    f = functools.partial(saxpy.op(), a=3.0)
    grads = jax.jit(jax.grad(lambda x, y: (f(x, y) ** 2).sum(), (0, 1)))(*xy)
    want = jax.grad(lambda x, y: ((3 * x + y) ** 2).sum(), (0, 1))(*xy)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), grads, want)
    x = jnp.stack([xy[0], xy[1], xy[0] * 2])
    mapped = jax.jit(jax.vmap(f, (0, None)))(x, xy[1])
    np.testing.assert_allclose(mapped, 3 * np.asarray(x) + np.asarray(xy[1])[None], rtol=1e-6)


def test_a_layer_in_a_training_step():
    @eqx.filter_jit
    def step(layer, x):
        grads = eqx.filter_grad(lambda layer: (layer(x) ** 2).sum())(layer)
        return eqx.apply_updates(layer, jax.tree.map(lambda g: -0.1 * g, grads))

    np.testing.assert_allclose(step(saxpy.Saxpy(jnp.ones(1000), 0.5), jnp.zeros(1000)).y, np.full(1000, 0.8), rtol=1e-6)


TWICE = """
extern "C" __global__ void parts(const float* x, float* out, float* sums, int n) {
  float sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += x[i];
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
extern "C" __global__ void total(const float* x, float* out, float* sums, int n) {
  float sum = 0;
  for (int i = 0; i < 4 * 32; ++i) sum += sums[i];
  out[threadIdx.x] = sum;
}
"""


def test_several_launches_and_a_workspace():
    """The second launch reads what the first has written: they are in order on one stream."""
    op = one(
        TWICE,
        entry="parts",
        launch=[eqxc.Launch(grid=4, block=32), eqxc.Launch(grid=1, block=32, entry="total")],
        out_type=lambda x: jax.ShapeDtypeStruct((32,), jnp.float32),
        scalars={"n": ("int32", lambda x: x.size)},
        workspaces=[jax.ShapeDtypeStruct((4 * 32,), jnp.float32)],
    )
    for count in (1, 1000):
        np.testing.assert_array_equal(jax.jit(lambda x: op(x))(jnp.ones(count)), np.full(32, count, np.float32))


def test_aliased_and_donated(xy):
    x = xy[0]
    want = 3 * np.asarray(x) + np.asarray(xy[1])
    f = jax.jit(functools.partial(saxpy.op(aliases={"y": 0}), a=3.0), donate_argnums=1)
    kept = jnp.array(xy[1])
    pointer = kept.unsafe_buffer_pointer()
    out = f(x, kept)
    assert out.unsafe_buffer_pointer() == pointer
    np.testing.assert_allclose(out, want, rtol=1e-6)
    undonated = jax.jit(functools.partial(saxpy.op(aliases={"y": 0}), a=3.0))
    np.testing.assert_allclose(undonated(x, xy[1]), want, rtol=1e-6)
    np.testing.assert_allclose(undonated(x, xy[1]), want, rtol=1e-6)  # what it was given is as it was


SHARED = """
extern "C" __global__ void entry(const float* x, float* out, int count) {
  extern __shared__ float shared[];
  for (int i = threadIdx.x; i < count; i += blockDim.x) shared[i] = x[i % 1000];
  __syncthreads();
  for (int i = threadIdx.x; i < 1000; i += blockDim.x) out[i] = shared[count - 1000 + i];
}
"""


@pytest.mark.parametrize("kilobytes", [40, 48, 96, 150])
def test_large_shared_memory(kilobytes):
    count = 1000 * (kilobytes * 1024 // 4000)  # whole rows of x
    launch = eqxc.Launch(grid=1, block=256, shared_bytes=kilobytes * 1024)
    op = one(SHARED, launch=launch, scalars={"count": ("int32", lambda x: count)})
    x = jnp.arange(1000.0)
    np.testing.assert_array_equal(jax.jit(lambda x: op(x))(x), x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "bool"])
def test_templates_for_dtypes(dtype):
    source = """
    #include <cuda_bf16.h>
    #include <cuda_fp16.h>
    namespace mine { template <typename T, int N> __global__ void copy(const T* x, T* out) {
      if (threadIdx.x < N) out[threadIdx.x] = x[N - 1 - threadIdx.x];
    } }
    """
    entry = lambda x: f"mine::copy<{eqxc.CudaKernel.ctype(x.dtype)}, {x.size}>"
    op = one(source, entry=entry)
    with jax.enable_x64(True):
        x = jnp.arange(30).astype(dtype)
        np.testing.assert_array_equal(jax.jit(lambda x: op(x))(x), x[::-1])


def test_a_source_in_a_file_that_includes_another(tmp_path, xy):
    (tmp_path / "twice.cuh").write_text("__device__ float twice(float x) { return 2 * x; }\n")
    body = 'extern "C" __global__ void entry(const float* x, float* out) { out[threadIdx.x] = twice(x[threadIdx.x]); }'
    (tmp_path / "mine.cu").write_text('#include "twice.cuh"\n' + body)
    op = one(tmp_path / "mine.cu", launch=eqxc.Launch(grid=1, block=1000))
    np.testing.assert_array_equal(jax.jit(lambda x: op(x))(xy[0]), 2 * xy[0])


def images_of(function, *args):
    """Yield the images that the launches of a program are given to load."""
    module: Any = jax.jit(function).lower(*args).compiler_ir()
    for function_of in module.body.operations:
        for block in function_of.regions[0]:
            for inner in block:
                if inner.operation.name == "stablehlo.custom_call":
                    attributes = {item.name: item.attr for item in inner.attributes["mhlo.backend_config"]}
                    yield np.array(attributes["images"]).tobytes()


def test_it_is_compiled_for_the_device_that_is_there(xy):
    (capability,) = set(xla.compute_capabilities())
    f = functools.partial(saxpy.op(), a=3.0)
    (image,) = images_of(f, *xy)
    (named,) = images_of(functools.partial(saxpy.op(arch=f"sm_{capability}"), a=3.0), *xy)
    assert image[:4] == b"\x7fELF"
    assert image == named


def test_ptx_for_an_older_architecture_runs(xy):
    f = jax.jit(functools.partial(saxpy.op(arch="compute_80"), a=3.0))
    np.testing.assert_allclose(f(*xy), 3 * np.asarray(xy[0]) + np.asarray(xy[1]), rtol=1e-6)


def failing(f, *args):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(f(*args))
    return str(error.value)


WRITES_ONE = 'extern "C" __global__ void entry(const float* x, float* out) { out[threadIdx.x] = 1; }'


def test_a_cubin_for_another_architecture(xy):
    other = 80 if xla.compute_capabilities()[0] >= 90 else 90
    op = one(WRITES_ONE, arch=f"sm_{other}")
    text = failing(jax.jit(lambda x: op(x)), xy[0])
    assert "one[cuda]: " in text
    assert "The kernel was compiled for another architecture" in text


@pytest.mark.parametrize("captured", [False, True])
def test_more_shared_memory_than_there_is(xy, captured):
    op = one(WRITES_ONE, launch=eqxc.Launch(grid=1, block=32, shared_bytes=1 << 20))
    f = eqxc.jit_captured(lambda x: op(x)) if captured else jax.jit(lambda x: op(x))
    text = failing(f, xy[0])
    assert "one[cuda]: cuFuncSetAttribute(entry, 1048576 bytes of shared memory) failed: " in text


# What only the driver knows: that blocks which wait for each other are too many to run together.
TOO_MANY_BLOCKS = eqxc.Launch(grid=1 << 20, block=256, cooperative=True)


def test_a_launch_that_the_driver_refuses(xy):
    op = one(WRITES_ONE, launch=TOO_MANY_BLOCKS)
    text = failing(jax.jit(lambda x: op(x)), xy[0])
    assert "one[cuda]: cuLaunchKernelEx(entry, grid (1048576, 1, 1), block (256, 1, 1)" in text
    assert "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE" in text


def test_the_next_call_is_not_hurt(xy):
    wrong, right = one(WRITES_ONE, launch=TOO_MANY_BLOCKS), one(WRITES_ONE)
    failing(jax.jit(lambda x: wrong(x)), xy[0])
    np.testing.assert_array_equal(jax.jit(lambda x: right(x))(xy[0])[:32], np.ones(32))


def run_in_process(program, *arguments):
    """Run a program in a process of its own, and return what it prints, as JSON."""
    environment = {
        **os.environ,
        # After what is there already: the package may be in another folder than the checkout.
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *map(str, FOLDERS)])),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # this process has its memory already
    }
    command = [sys.executable, "-c", program, *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


LOAD = """
import json, pathlib, sys
import jax, numpy as np
import eqxcallback
call = jax.export.deserialize(pathlib.Path(sys.argv[1]).read_bytes()).call
x = np.arange(1000, dtype=np.float32)
print(json.dumps([float(np.asarray(f(x, x)).sum()) for f in (call, jax.jit(call))]))
"""


def test_export_and_load_in_another_process(xy, tmp_path):
    """The image is in the program: no source and no compiler is needed there."""
    f = functools.partial(saxpy.op(), a=3.0)
    (tmp_path / "program").write_bytes(eqxc.export(f)(xy[0], xy[0]).serialize())
    want = 4 * 999 * 1000 / 2
    assert run_in_process(LOAD, tmp_path / "program") == [want, want]


CACHED = (
    COUNT_HITS
    + """
import functools, json
import jax, jax.numpy as jnp, numpy as np, saxpy
from eqxcallback import ops

x = jnp.arange(1000.0)
functions = [functools.partial(saxpy.op(), a=float(sys.argv[2])), lambda x, y: ops.rms_norm(x, y)]
hits.clear()
programs = [jax.jit(f).lower(x, x).compile() for f in functions]
print(json.dumps({"hits": len(hits), "sums": [float(np.asarray(p(x, x)).sum()) for p in programs]}))
"""
)


def test_the_persistent_cache_of_programs(tmp_path):
    first, second = (run_in_process(CACHED, tmp_path, "3") for _ in range(2))
    assert (first["hits"], second["hits"]) == (0, 2)
    assert first["sums"] == second["sums"]
    assert second["sums"][0] == 4 * 999 * 1000 / 2
    # An option is another program.
    other = run_in_process(CACHED, tmp_path, "4")
    assert (other["hits"], other["sums"][0]) == (1, 5 * 999 * 1000 / 2)
