"""CUDA on a CPU: declarations in each way that CUDA allows, and kernels that end themselves."""

import ctypes
import functools

import numpy as np
import pytest

from eqxcallback.emulation import build

from .running import Call, Launch, run


SHARED = {
    "of_function": "extern __shared__ float tile[];",
    "aligned": "extern __shared__ __align__(sizeof(float4)) float tile[];",
    "volatile_words": "extern volatile __shared__ float tile[];",
    "said_static": "static __shared__ float tile[32];",
    "of_file": "float* const tile = shared_by_all;",
    "of_namespace": "float* const tile = reinterpret_cast<float*>(inner::bytes);",
}
SOURCE = """
// extern __shared__ float commented[]; { '{' "{"
#define BRACE '{'
extern __shared__ float shared_by_all[];
namespace inner { extern "C" {
extern __shared__ __align__(16) unsigned char bytes[];
} }
static __constant__ float first[2] = {3, 4};
__constant__ static float second[2] = {5, 6};
inline __device__ __forceinline__ float sum(float x, float y) { return x + y; }
__device__ __noinline__ float product(float x, float y) { return x * y; }
__device__ unsigned counter = 1;

__global__ void words(float* out) {
  const int i = threadIdx.x;
  out[i] = sum(product(first[i % 2], second[i % 2]), i == 0 ? atomicDec(&counter, 7) : 0);
}
__global__ void asserts(float* out) {
  assert(threadIdx.x < 7 && "few threads");
  out[0] = 1;
}
__global__ void traps(float* out) {
  if (threadIdx.x == 3) __trap();
  out[0] = 1;
}
__global__ void large(float* out) {
  volatile float own[100000];
  for (int i = 0; i < 100000; ++i) own[i] = i;
  out[threadIdx.x] = own[threadIdx.x];
}
__device__ int depth(int n) {
  volatile char own[1000];
  own[n % 1000] = n;
  return n == 0 ? 0 : depth(n - 1) + own[n % 1000];
}
__global__ void recursive(float* out) { out[threadIdx.x] = depth(2000); }
""" + "\n".join(
    f"__global__ void {name}(float* out) {{ {declared} tile[threadIdx.x] = threadIdx.x; __syncthreads();\n"
    "  out[threadIdx.x] = tile[31 - threadIdx.x]; }"
    for name, declared in SHARED.items()
)
ENTRIES = ["words", "asserts", "traps", "large", "recursive", *SHARED]
INDEX = {name: i for i, name in enumerate(ENTRIES)}


@functools.cache
def library():
    return ctypes.CDLL(str(build(SOURCE, ENTRIES)))


def results(name, seed):
    call = Call("", [Launch(name, (1,), (32,), 128)], [], [((32,), np.float32)], [])
    return run(library(), INDEX, call, seed)[0]


@pytest.mark.parametrize("name", SHARED)
def test_shared_memory(name):
    for seed in (0, 1):
        np.testing.assert_array_equal(results(name, seed), np.arange(31, -1, -1))


def test_words():
    first = [results("words", 0)[0] for _ in range(3)]
    assert first == [16, 15, 22]  # the counter is 1, 0, and then what it begins again with
    np.testing.assert_array_equal(results("words", 1)[1:], np.resize([24, 15], 31))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (
            "asserts",
            r"thread \(\d+, 0, 0\) of block \(0, 0, 0\) breaks the assertion threadIdx.x < 7 && .* in line \d+",
        ),
        ("traps", r"thread \(3, 0, 0\) of block \(0, 0, 0\) calls __trap"),
        ("large", "has more than 256 KiB of arrays and calls of its own"),
        ("recursive", "has more than 256 KiB of arrays and calls of its own"),
    ],
)
def test_a_kernel_that_ends_itself(name, error):
    """It ends its launch, and not the process, which launches the next one."""
    for seed in (0, 1):
        with pytest.raises(RuntimeError, match=error):
            results(name, seed)
    np.testing.assert_array_equal(results("of_file", 1), np.arange(31, -1, -1))
