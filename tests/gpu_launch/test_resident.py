"""Kernels that ask how many of their blocks a multiprocessor runs at a time. They are compiled; nothing runs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from benchmarks.programs import decode_by_tensor_cores
from eqxcallback.backends._image import Compiled
from eqxcallback.backends._resident import resident_blocks
from eqxcallback.kernel import Launch
from eqxcallback.testing import emulated

from .cuda_programs import F32, attributes, lowered, simple


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    ("version", "registers", "threads", "shared", "blocks"),
    [
        (90, 128, 128, 0, 4),
        (90, 129, 128, 0, 3),
        (90, 246, 128, 0, 2),
        (80, 64, 512, 0, 2),
        (80, 65, 512, 0, 1),
        (90, 55, 1024, 0, 1),
        (90, 40, 128, 0, 12),  # 51 warps fit; of each four, all or none
        (90, 16, 128, 0, 16),  # 2048 threads
        (86, 16, 128, 0, 12),  # 1536
        (90, 16, 32, 0, 32),
        (89, 16, 32, 0, 24),
        (80, 32, 128, 48 << 10, 3),
        (90, 32, 128, 48 << 10, 4),
        (86, 32, 128, 48 << 10, 2),
        (75, 32, 128, 32 << 10, 2),
        (90, 255, 32, 0, 8),
        (90, 255, 1024, 0, 1),  # which the driver refuses
        (130, 128, 128, 0, 4),  # nobody knows it yet
    ],
    ids=str,
)
def test_as_nvidia_counts(version, registers, threads, shared, blocks):
    for static in (0, shared // 2):
        usage = Compiled((), registers, 0, static)
        assert resident_blocks(version, usage, threads, shared - static) == blocks


WORK = """
extern "C" __global__ void __launch_bounds__(BOUNDS) entry(const float* x, float* out, float* work, int parts) {
  float of[64];
  for (int i = 0; i < 64; ++i) of[i] = x[threadIdx.x + 256 * i];
  for (int j = 0; j < parts; ++j) {
    for (int i = 0; i < 64; ++i) of[i] = of[i] * of[(i + 1) % 64] + j;
  }
  for (int i = 0; i < 64; ++i) out[(threadIdx.x + 256 * i) % 1000] = of[i];
}
"""


def asking(bounds, **changed):
    fields = {
        "launch": eqxc.Launch(grid=lambda x, *, resident_blocks: 10 * resident_blocks, block=256),
        "scalars": {"parts": ("int32", lambda x, *, resident_blocks: resident_blocks)},
        "workspaces": lambda x, *, resident_blocks: [jax.ShapeDtypeStruct((resident_blocks, 3), jnp.float32)],
        "asks_resident_blocks": True,
        **changed,
    }
    return simple(WORK.replace("BOUNDS", bounds), **fields)


@pytest.mark.parametrize(
    ("bounds", "arch", "blocks"),
    [("256, 1", "sm_90", 1), ("256, 2", "sm_90", 2), ("256, 4", "sm_90", 4), ("256, 4", "compute_80", 2)],
)
def test_grid_scalars_and_workspaces_follow_what_was_compiled(bounds, arch, blocks):
    program = lowered(asking(bounds, arch=arch), F32)
    launch = attributes(program)
    assert launch["geometry"][0] == 10 * blocks
    assert launch["scalars"].view("i4")[0] == blocks
    assert f"tensor<{blocks}x3xf32>" in program.as_text()


def test_shared_memory_counts():
    launch = Launch(grid=lambda x, *, resident_blocks: resident_blocks, block=32, shared_bytes=100_000)
    assert attributes(lowered(asking("256, 1", arch="sm_90", launch=launch), F32))["geometry"][0] == 2
    launch = Launch(grid=lambda x, *, resident_blocks: resident_blocks, block=32, shared_bytes=40_000)
    assert attributes(lowered(asking("256, 1", arch="sm_90", launch=launch), F32))["geometry"][0] == 5


SHAPES = {"bfloat16": 4, "int8": 2}


@pytest.mark.parametrize("cache", SHAPES)
@pytest.mark.parametrize("multiprocessors", [None, 108, 148])
def test_parts_of_a_cache_are_as_many_blocks_as_run_at_a_time(cache, multiprocessors, monkeypatch):
    if multiprocessors is not None:
        monkeypatch.setattr(jax, "local_devices", lambda backend: [SimpleNamespace(core_count=multiprocessors)])
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "sm_90")
    q = jax.ShapeDtypeStruct((2, 32, 128), jnp.bfloat16)
    # Of 16 MiB it would go through tensor cores.
    kv, length = jax.ShapeDtypeStruct((2, 2000, 8, 128), cache), jax.ShapeDtypeStruct((2,), jnp.int32)
    scales = [jax.ShapeDtypeStruct(kv.shape[:-1], jnp.float32)] * 2 if cache == "int8" else []

    def attend(q, kv, length, *scales):
        named = dict(zip(("k_scale", "v_scale"), scales, strict=False))
        return eqxc.ops.decode_attention(q, kv, kv, length, **named)

    program = jax.jit(attend).trace(q, kv, length, *scales).lower(lowering_platforms=("cuda",))
    # 2 examples of 8 key/value heads, whose 4 query heads share a block.
    assert attributes(program)["geometry"][0] == SHAPES[cache] * (multiprocessors or 132) // 16 * 16


@pytest.mark.parametrize(("batch", "blocks"), [(2, 3 * 132 // 16 * 16), (64, 64 * 8)])
def test_parts_by_tensor_cores(batch, blocks, monkeypatch):
    """Three blocks are resident. Where examples and heads are as many, the keys of each are one part, and nothing joins."""
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "sm_90")
    q, kv = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((batch, 32, 128), (batch, 65_536, 8, 128)))
    length = jax.ShapeDtypeStruct((batch,), jnp.int32)
    program = jax.jit(decode_by_tensor_cores).trace(q, kv, kv, length).lower(lowering_platforms=("cuda",))
    first, second = attributes(program)["geometry"].reshape(2, -1)
    assert first[0] == blocks
    assert second[0] == (0 if batch == 64 else batch * 32 * 4)


def test_an_emulated_kernel_is_told_two():
    source = """
    extern "C" __global__ void entry(const float* x, float* out, int blocks) {
      for (int i = threadIdx.x; i < 1000; i += blockDim.x) out[i] = x[i] + blocks;
    }
    """
    scalars = {"blocks": ("int32", lambda x, *, resident_blocks: resident_blocks)}
    op = eqxc.Op("op", kernels={"cuda": simple(source, scalars=scalars, asks_resident_blocks=True)})
    np.testing.assert_array_equal(emulated(op)(jnp.ones(1000)), 3)
