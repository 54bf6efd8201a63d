"""Launches with attributes, on a driver that checks and records them, and runs nothing."""

import dataclasses
import functools
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.backends import _triton
from eqxcallback.backends._step import Program, Step, check_scratch


X = jnp.ones((4, 8))


@pytest.fixture(autouse=True)
def _driver(driver, compiler):
    """For all tests here."""


def call(kernel, *args, **options):
    op = eqxc.Op("op", kernels={"cpu": kernel}, reference=lambda x, **_: x)
    return jax.block_until_ready(jax.jit(lambda *args: op(*args, **options))(*args))


def kernel(*launches, **changed):
    return eqxc.CudaKernel("the source {}", "entry", launches, **changed)


def parameters(driver):
    return [line.split()[1:] for line in driver.log if line.startswith("parameters")]


@pytest.mark.parametrize(
    ("asked", "attributes"),
    [
        ({"cluster": (2, 3)}, "cluster=(2,3,1)"),
        ({"cluster": lambda x: (x.shape[0], 3)}, "cluster=(4,3,1)"),
        ({"cooperative": True}, "cooperative=1"),
        ({"programmatic": True}, "programmatic=1"),
        ({"cluster": 2, "cooperative": True, "programmatic": True}, "cooperative=1 cluster=(2,1,1) programmatic=1"),
    ],
)
def test_attributes(driver, asked, attributes):
    call(kernel(eqxc.Launch((8, 6), 32, **asked), eqxc.Launch((8, 6), 64)), X)
    first, second = driver.launches
    stream = "shared=0 device=0 stream=(nil)"
    assert first == f"cuLaunchKernelEx entry_lowered grid=(8,6,1) block=(32,1,1) {stream} {attributes}"
    assert second == f"cuLaunchKernel entry_lowered grid=(8,6,1) block=(64,1,1) {stream}"
    assert len({tuple(words) for words in parameters(driver)}) == 1


def test_an_error_of_the_driver(driver):
    driver.fail("cuLaunchKernelEx", 912)
    text = r"cuLaunchKernelEx\(entry_lowered, grid .*, 0 bytes of shared memory, clusters of \(2, 1, 1\)"
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"op\[cuda\]: {text}, programmatic\) failed"):
        call(kernel(eqxc.Launch((8, 6), 32, cluster=2, programmatic=True)), X)


# An H100 has 132 multiprocessors, each of which has 2048 threads, 32 blocks, and 228 KiB of shared memory, 1 of them a block's.
@pytest.mark.parametrize(
    ("block", "shared_bytes", "most"),
    [(1024, 0, 264), (96, 0, 2772), (32, 0, 4224), (64, 100 << 10, 264), (64, 200 << 10, 132)],
)
def test_a_cooperative_grid_fits_on_the_device(driver, block, shared_bytes, most):
    launch = functools.partial(eqxc.Launch, block=block, shared_bytes=shared_bytes)
    call(kernel(launch(most, cooperative=True)), X)
    call(kernel(launch(most + 1)), X)
    text = rf"op\[cuda\]: cuLaunchKernelEx\(entry_lowered, grid \({most + 1}, 1, 1\), .*, cooperative\) failed: too many blocks"
    remedy = "All blocks of a cooperative launch run at once: make the grid smaller, or let more blocks fit on a multiprocessor."
    with pytest.raises(jax.errors.JaxRuntimeError, match=text) as raised:
        call(kernel(launch(most + 1, cooperative=True)), X)
    assert f"(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE). {remedy}" in str(raised.value)
    assert len(driver.launches) == 2


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"cluster": 17}, ValueError, r"entry: expected cluster to have 1 to 16 blocks; got \(17, 1, 1\)\."),
        (
            {"cluster": 3},
            ValueError,
            r"entry: expected grid to be a multiple of cluster, \(3, 1, 1\); got \(8, 6, 1\)\.",
        ),
        (
            {"cluster": 2, "arch": "sm_80"},
            ValueError,
            r"expected arch to be sm_90 or newer, for clusters, .*; got sm_80\.",
        ),
        ({"cluster": -1}, TypeError, "Launch: expected cluster to be an integer or up to three"),
        ({"cooperative": 1}, TypeError, "Launch: expected cooperative to be True or False; got 1"),
    ],
)
def test_what_is_refused_when_a_program_is_lowered(asked, error, text):
    changed = {"arch": asked.pop("arch")} if "arch" in asked else {}
    with pytest.raises(error, match=text):
        call(kernel(eqxc.Launch((8, 6), 32, **asked), **changed), X)


def test_attributes_make_another_kernel():
    plain, cluster = (kernel(eqxc.Launch(8, 32, cluster=size)) for size in (1, 2))
    assert plain == kernel(eqxc.Launch(8, 32)) != cluster


def test_scratch_memory_of_a_compiler(driver, monkeypatch):
    """Each launch has its own part: one that is launched programmatically begins before the one ahead has ended."""
    steps = [
        Step.checked(0, "f", "f", grid=2, block=32, shared_bytes=0, scratch_bytes=size, programmatic=size > 0)
        for size in (200, 0, 56, 128)
    ]
    monkeypatch.setattr(_triton, "compiled", lambda *_: Program((b"image 5 scratch",), tuple(steps), 2))
    of = eqxc.TritonKernel("nowhere:f", grid=2, scalars={"n": ("int32", lambda x: x.size)})
    out = call(of, X)
    launched = [list(map(int, words)) for words in parameters(driver)]
    assert [words[:3] + words[4:] for words in launched] == [
        [X.unsafe_buffer_pointer(), out.unsafe_buffer_pointer(), 32, 0]
    ] * 4
    begin = launched[0][3]
    assert begin not in (0, *launched[0][:2])
    assert [words[3] - begin for words in launched] == [0, 256, 256, 384]


def test_scratch_memory_that_xla_does_not_have():
    check_scratch(128, "f")
    with pytest.raises(
        ValueError, match=r"f: expected scratch memory at multiples of 128 bytes.*; the compiler wants 256"
    ):
        check_scratch(256, "f")


PARTS = np.dtype([("scale", "f4"), ("count", "i8"), ("flag", "?")], align=True)


def test_structures_by_value(driver):
    scalars = {
        "n": "int32",
        "parts": (PARTS, lambda x, **_: (0.5, x.size, True)),
        "raw": "V3",
        "last": "uint8",
    }
    call(kernel(eqxc.Launch(1, 32), scalars=scalars), X, n=-1, raw=b"abc", last=9)
    n, parts, raw, last = parameters(driver)[0][2:]
    assert np.uint64(n).view("i4, i4")[0] == -1
    assert parts == "0x0000003f00000000" + "2000000000000000" + "0100000000000000"  # zeros between fields
    assert int(raw) == int.from_bytes(b"abc", "little")
    assert int(last) == 9


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("V3", b"ab"), (PARTS, (1.0, 2)), (PARTS, (1.0, 2**70, True)), (PARTS, 3), (PARTS, np.zeros(2, PARTS))],
)
def test_structures_that_do_not_fit(dtype, value):
    with pytest.raises(ValueError, match="expected the scalar s to be a tuple or"):
        call(kernel(eqxc.Launch(1, 32), scalars={"s": (dtype, lambda x: value)}), X)


SHIFT = """
struct Shift { float scale; long long count; bool flag; };
extern "C" __global__ void entry(const float* x, float* out, Shift shift, int n) {
  if (threadIdx.x < shift.count) out[threadIdx.x] = shift.flag ? shift.scale * x[threadIdx.x] + n : 0;
}
"""


def test_structures_that_are_emulated():
    scalars = {"s": (PARTS, lambda x: (0.5, x.size, True)), "n": ("int32", lambda x: 3)}
    cuda = eqxc.CudaKernel(SHIFT, "entry", eqxc.Launch(1, 32), scalars=scalars)
    f = eqxc.testing.emulated(eqxc.Op("op", kernels={"cuda": cuda}, reference=lambda x: 0.5 * x + 3))
    np.testing.assert_allclose(jax.jit(f)(jnp.arange(32.0)), 0.5 * np.arange(32) + 3)
    smaller = np.dtype([("scale", "f4"), ("count", "i4")], align=True)
    wrong = dataclasses.replace(cuda, scalars={**scalars, "s": (smaller, lambda x: (0.5, 32))})
    f = eqxc.testing.emulated(eqxc.Op("op", kernels={"cuda": wrong}, reference=lambda x: x))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="expected entry to have parameter 3 to be a structure of 8 bytes, for s"
    ):
        jax.block_until_ready(f(jnp.arange(32.0)))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"scalars": {"map": eqxc.TensorMap("x", (8, 8))}},
            "copies by the tensor memory accelerator, .* are not emulated",
        ),
        ({"launch": eqxc.Launch(2, 32, cluster=2)}, "blocks that wait for each other, .* are not emulated"),
    ],
)
def test_what_is_not_emulated(fields, text):
    source = """
    extern "C" __global__ void entry(const float* x, float* out) {}
    """
    cuda = dataclasses.replace(eqxc.CudaKernel(source, "entry", eqxc.Launch(1, 32)), **fields)
    f = eqxc.testing.emulated(eqxc.Op("op", kernels={"cuda": cuda}, reference=lambda x: x))
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(f(X))


HALF = jnp.ones((3, 40, 64), jnp.bfloat16)


def with_map(of: str | int = "x", box=(1, 8, 64), **fields):
    return {"n": ("int32", lambda *args: 7), "map": eqxc.TensorMap(of, box, **fields), "m": ("int32", lambda *args: 8)}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {},
            "type=9 dims=64,40,3, strides=128,5120, box=64,8,1, element_strides=1,1,1, interleave=0 swizzle=0 promotion=0 fill=0",
        ),
        (
            {"swizzle": "128", "l2_promotion": "256", "nan_outside": True, "element_strides": (1, 2, 1)},
            "type=9 dims=64,40,3, strides=128,5120, box=64,8,1, element_strides=1,2,1, interleave=0 swizzle=3 promotion=3 fill=1",
        ),
        (
            {"shape": lambda x: (x.size // 64, 32), "box": (256, 32), "strides": (64,)},
            "type=9 dims=32,120, strides=128, box=32,256, element_strides=1,1, interleave=0 swizzle=0 promotion=0 fill=0",
        ),
    ],
)
def test_tensor_maps(driver, fields, text):
    op = eqxc.Op("op", kernels={"cpu": kernel(eqxc.Launch(1, 32), scalars=with_map(**fields))}, reference=lambda x: x)
    f = jax.jit(lambda x: op(x))
    arrays = [HALF, HALF + 1]  # the address is known when it runs, and another one each time
    for x in arrays:
        jax.block_until_ready(f(x))
    encoded = [line for line in driver.log if line.startswith("cuTensorMapEncodeTiled")]
    assert encoded == [f"cuTensorMapEncodeTiled {text}"] * 2
    for x, (pointer, _, n, of_x, m) in zip(arrays, parameters(driver), strict=True):
        assert (int(n), int(m)) == (7, 8)
        words = np.frombuffer(bytes.fromhex(of_x[2:]), np.uint64)
        assert words[:2].tobytes()[:8] == b"am a map"
        assert words[1] == int(pointer) == x.unsafe_buffer_pointer()
        assert len(words) == 16


def test_maps_of_results_and_of_nothing(driver):
    empty = jnp.ones((0, 64), jnp.bfloat16)
    scalars = {"out": eqxc.TensorMap(2, (8, 8)), "no_y": eqxc.TensorMap("y", (8, 8))}
    of = kernel(eqxc.Launch(1, 32), scalars=scalars, out_type=lambda x, y: jax.ShapeDtypeStruct((16, 16), jnp.float32))
    op = eqxc.Op("op", kernels={"cpu": of}, reference=lambda x, y: jnp.ones((16, 16)))
    for y in (None, empty):
        driver.reset()
        out = jax.block_until_ready(jax.jit(lambda x, y: op(x, y))(X, y))
        *_, of_out, of_y = parameters(driver)[0]
        assert np.frombuffer(bytes.fromhex(of_out[2:]), np.uint64)[1] == out.unsafe_buffer_pointer()
        assert set(of_y[2:]) == {"0"}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"of": "y"}, r"expected of to be one of x, out; got 'y'\."),
        ({"box": (8, 64)}, r"expected box to be 3 numbers of 1 to 256, for \(3, 40, 64\); got \(8, 64\)\."),
        ({"box": (1, 8, 4)}, "expected a row of the box to have a multiple of 16 bytes; got 4 of 2 bytes"),
        (
            {"swizzle": "64"},
            "expected a row of the box to have at most 64 bytes, which are swizzled; got 64 of 2 bytes",
        ),
        ({"strides": (2560, 60)}, "expected strides to be 2 numbers, each a multiple of 16 bytes; got"),
        ({"element_strides": (1, 9, 1)}, "expected element_strides to be 3 numbers of 1 to 8"),
        ({"shape": (1,) * 6}, "expected shape to have 1 to 5 dimensions"),
        ({"shape": (1.5, 2)}, "expected shape to be integers"),
        ({"tf32": True}, "expected an array of float32 for tf32=True; got bfloat16"),
    ],
)
def test_maps_that_no_gpu_has(fields, text):
    with pytest.raises((ValueError, TypeError), match=rf"op\[cuda\]: the tensor map map: {text}"):
        call(kernel(eqxc.Launch(1, 32), scalars=with_map(**fields)), HALF)


def test_wrong_declarations_of_maps():
    with pytest.raises(ValueError, match="TensorMap: expected swizzle to be one of none, 32, 64, 128; got '16'"):
        eqxc.TensorMap("x", 8, swizzle="16")
    with pytest.raises(TypeError, match="TensorMap: expected of to be the name of an array"):
        eqxc.TensorMap(None, 8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        TypeError, match=r"expected scalars to be numbers; got the structure map. Make descriptors in the kernel"
    ):
        eqxc.TritonKernel("nowhere:f", grid=1, scalars=with_map())
    same, other = eqxc.TensorMap("x", (1, 8, 64)), eqxc.TensorMap("x", (1, 8, 64), swizzle="128")
    assert eqxc.TensorMap("x", [1, 8, 64]) == same != other
    assert hash(kernel(eqxc.Launch(1, 32), scalars=with_map(box=[1, 8, 64])))


def test_the_abi_is_that_of_cuda(tmp_path):
    """The types that the launcher and the fake driver take from `cuda.h`, compared with it."""
    triton = pytest.importorskip("triton", reason="Triton, whose wheel has cuda.h, is not installed")
    include = pathlib.Path(triton.__file__).parent / "backends/nvidia/include"
    source = tmp_path / "abi.cc"
    source.write_text(ABI)
    paths = ["-I", str(include), "-I", str(pathlib.Path(__file__).parents[2] / "csrc")]
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", *paths, str(source)], check=True)


ABI = """
#include <cuda.h>
#include "gpu/attributes.h"
#include "gpu/tensor_map.h"
using namespace eqxcallback::gpu;
#define SAME(a, b) static_assert(static_cast<long long>(a) == static_cast<long long>(b), #a)
SAME(sizeof(CUlaunchConfig), sizeof(LaunchConfig));
SAME(offsetof(CUlaunchConfig, hStream), offsetof(LaunchConfig, stream));
SAME(offsetof(CUlaunchConfig, attrs), offsetof(LaunchConfig, attributes));
SAME(offsetof(CUlaunchConfig, numAttrs), offsetof(LaunchConfig, count));
SAME(sizeof(CUlaunchAttribute), sizeof(LaunchAttribute));
SAME(offsetof(CUlaunchAttribute, value), offsetof(LaunchAttribute, value));
SAME(CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 2);
SAME(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, 4);
SAME(CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE, 5);
SAME(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 6);
SAME(CU_CLUSTER_SCHEDULING_POLICY_SPREAD, 1);
SAME(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, Driver::kNonPortableClusterSize);
SAME(sizeof(CUtensorMap), 8 * TensorMap::kWords);
SAME(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 9);
SAME(CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, 11);
SAME(CU_TENSOR_MAP_SWIZZLE_128B, 3);
SAME(CU_TENSOR_MAP_L2_PROMOTION_L2_256B, 3);
SAME(CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA, 1);
"""
