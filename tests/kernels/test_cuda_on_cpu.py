"""CUDA on a CPU: what the language means, and that mistakes are found."""

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile

import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback.emulation import CudaLibrary, NotEmulated, build
from eqxcallback.emulation._build import compiler

from ..endless_compiler import check_killed, endless_compiler
from .running import Call, Launch, run
from .test_cuda_sanitized import sanitized


SOURCE = """
// Two warps: each lane's neighbours, a vote, and a sum of the block by shared memory.
__global__ void language(const float* x, float* out, int* votes, long long n) {
  __shared__ float sums[2];
  const int i = threadIdx.x, lane = i % 32;
  float value = x[i];
  out[i] = __shfl_down_sync(~0u, value, 1) - __shfl_up_sync(~0u, value, 1);
  out[n + i] = __shfl_sync(~0u, value, 5, 16) + __shfl_xor_sync(~0u, value, 3);
  for (int other = 16; other > 0; other /= 2) value += __shfl_xor_sync(~0u, value, other);
  if (lane == 0) sums[i / 32] = value;
  __syncthreads();
  out[2 * n + i] = sums[0] + sums[1];
  const unsigned odd = __ballot_sync(~0u, i & 1);
  if (i & 1) {
    __syncwarp(odd);  // half a warp on its own
    atomicAdd(votes, 1);
  }
  votes[1 + i] = __syncthreads_count(i < 40) + 1000 * __any_sync(~0u, i == 40) + 100 * __all_sync(~0u, i < 32);
}

// A block of 4 x 2 x 2 threads says where they are, the last dynamic shared element what it was before.
__global__ void places(float* out) {
  DYN_SHARED(float, shared);
  const int i = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  if (i == 0) out[block * 17 + 16] = shared[16];
  shared[i] = 100 * block + i;
  __syncthreads();
  out[block * 17 + i] = shared[15 - i];
  if (i == 0) shared[16] = 7;
}

__global__ void static_memory(float* out) {
  __shared__ float kept[2];
  if (threadIdx.x == 0) out[blockIdx.x] = kept[1];
  kept[1] = 7;
}

template <bool has_barrier>
__global__ void reverse(const float* x, float* out) {
  __shared__ float shared[64];
  shared[threadIdx.x] = x[threadIdx.x];
  if (has_barrier) __syncthreads();
  out[threadIdx.x] = shared[63 - threadIdx.x];
}

template <bool has_barrier>
__global__ void one_after_the_other(const float* x, float* out) {
  __shared__ float total;
  for (int i = 0; i < 2; ++i) {
    if (threadIdx.x == 0) total = x[i];
    __syncthreads();
    out[64 * i + threadIdx.x] = total;
    if (has_barrier) __syncthreads();
  }
}

__global__ void divergent_barrier(float* out) {
  if (threadIdx.x < 16) __syncthreads();
  out[threadIdx.x] = 0;
  __syncthreads();
}

__global__ void barrier_against_shuffle(float* out) {
  if (threadIdx.x < 16) __syncthreads();
  else out[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 1);
}

__global__ void wrong_mask(float* out) {
  if (threadIdx.x & 1) out[threadIdx.x] = __shfl_xor_sync(0x55555555u, 1.0f, 2);
}

__global__ void different_operations(float* out) {
  if (threadIdx.x & 1) out[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 2);
  else out[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 4);
}

__global__ void silent_lane(float* out) {
  if (threadIdx.x == 3) return;
  out[threadIdx.x] = __shfl_sync(~0u, 1.0f, 3);
}

// 16 x 16 times 16 x 8 elements of 16 bits: where lanes have them, PTX says.
__global__ void product(const __nv_bfloat16* a, const __nv_bfloat16* b, float* out) {
  const int row = threadIdx.x / 4, pair = threadIdx.x % 4;
  unsigned of_a[4], of_b[2];
  float sums[4];
  for (int i = 0; i < 4; ++i) {
    memcpy(&of_a[i], (const void*)(a + (row + i % 2 * 8) * 16 + 2 * pair + i / 2 * 8), 4);
    sums[i] = i;
  }
  for (int i = 0; i < 2; ++i) memcpy(&of_b[i], (const void*)(b + row * 16 + 2 * pair + i * 8), 4);
  cuda_cpu_mma_m16n8k16(sums, of_a, of_b, __nv_bfloat16());
  for (int i = 0; i < 4; ++i) out[(row + i / 2 * 8) * 8 + 2 * pair + i % 2] = sums[i];
}

__global__ void product_of_some(float* out) {
  const unsigned a[4] = {}, b[2] = {};
  float sums[4] = {};
  if (threadIdx.x != 5) cuda_cpu_mma_m16n8k16(sums, a, b, __nv_bfloat16());
  out[threadIdx.x] = sums[0];
  __syncwarp();
}

// Each lane says where row lane % 8 of matrix lane / 8 of four is.
template <bool transposed>
__global__ void matrices(const unsigned short* x, unsigned* out) {
  __shared__ uint4 shared[32];
  shared[threadIdx.x] = reinterpret_cast<const uint4*>(x)[threadIdx.x];
  __syncwarp();
  unsigned words[4];
  cuda_cpu_ldmatrix_x4(words, &shared[threadIdx.x], transposed);
  for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = words[i];
}

__global__ void misaligned_matrices(float* out) {
  __shared__ uint4 shared[33];
  unsigned words[4];
  cuda_cpu_ldmatrix_x4(words, reinterpret_cast<char*>(&shared[threadIdx.x]) + 8, false);
  out[threadIdx.x] = words[0];
}

// Each thread copies four times 16 bytes, of which the last time only 8 are there, in groups of 1, 2, 0 and 1 copies.
template <int left>
__global__ void copies(const uint4* x, float* out) {
  __shared__ uint4 shared[4 * 32];
  for (int i = 0; i < 4; ++i) {
    cuda_cpu_cp_async(&shared[32 * i + threadIdx.x], x + 32 * i + threadIdx.x, 16, i == 3 ? 8 : 16);
    if (i != 1) cuda_cpu_cp_async_commit_group();
    if (i == 2) cuda_cpu_cp_async_commit_group();
  }
  cuda_cpu_cp_async_wait_group(left);
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    for (int e = 0; e < 4; ++e) {
      out[(32 * i + threadIdx.x) * 4 + e] = reinterpret_cast<const float*>(&shared[32 * i + 31 - threadIdx.x])[e];
    }
  }
}

// A copy to where other lanes still read, unless they wait for each other.
template <bool has_barrier>
__global__ void copies_over(const float* x, float* out) {
  __shared__ float shared[64];
  shared[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = shared[63 - threadIdx.x];
  if (has_barrier) __syncthreads();
  cuda_cpu_cp_async(&shared[threadIdx.x], x + 64 + threadIdx.x, 4, 4);
  cuda_cpu_cp_async_commit_group();
  cuda_cpu_cp_async_wait_group(0);
  __syncthreads();
  out[64 + threadIdx.x] = shared[63 - threadIdx.x];
}

__global__ void misaligned_copies(const float* x, float* out) {
  __shared__ uint4 shared[32];
  cuda_cpu_cp_async(&shared[threadIdx.x], x + threadIdx.x, 16, 16);
  out[threadIdx.x] = 0;
}

__global__ void beyond_the_end(const float* x, float* out, long long n) { out[threadIdx.x + n] = x[threadIdx.x]; }

__global__ void beyond_shared_memory(float* out) {
  DYN_SHARED(float, shared);
  shared[threadIdx.x + 1] = 1;
  out[threadIdx.x] = shared[threadIdx.x];
}
"""
NAMES = [line.split("(")[0].split()[-1] for line in SOURCE.splitlines() if line.startswith("__global__")]
TEMPLATES = ["reverse", "one_after_the_other", "matrices", "copies_over"]
GROUPS_LEFT = range(5)
ENTRIES = [
    *(name for name in NAMES if name not in (*TEMPLATES, "copies")),
    *(f"{name}<{flag}>" for name in TEMPLATES for flag in ("true", "false")),
    *(f"copies<{left}>" for left in GROUPS_LEFT),
]
INDEX = {name: i for i, name in enumerate(ENTRIES)}


@functools.cache
def library():
    return ctypes.CDLL(str(build(SOURCE, ENTRIES)))


def call(name, *operands, out=(64,), threads=64, blocks=1, shared_bytes=0, scalars=()):
    results = [(shape, np.float32) for shape in ([out] if isinstance(out, tuple) else out)]
    return Call("", [Launch(name, (blocks,), (threads,), shared_bytes)], operands, results, scalars)


X = np.arange(64, dtype=np.float32) ** 2


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_language(seed):
    votes = np.zeros(65, np.int32)
    launch = Launch("language", (1,), (64,))
    how = Call("", [launch], [X], [((3, 64), np.float32), (votes.shape, np.int32)], [64])
    out, votes = run(library(), INDEX, how, seed)
    warps = X.reshape(2, 32)
    lanes = np.arange(32)
    np.testing.assert_array_equal(out[0], (warps[:, [*lanes[1:], 31]] - warps[:, [0, *lanes[:-1]]]).ravel())
    np.testing.assert_array_equal(out[1], (warps[:, lanes // 16 * 16 + 5] + warps[:, lanes ^ 3]).ravel())
    np.testing.assert_array_equal(out[2], np.full(64, X.sum()))
    assert votes[0] == -1 + 32  # of -1, which it was poisoned with
    np.testing.assert_array_equal(votes[1:33], np.full(32, 40 + 100))
    np.testing.assert_array_equal(votes[33:], np.full(32, 40 + 1000))


def test_places_and_poison():
    how = Call("", [Launch("places", (3, 2, 2), (4, 2, 2), 68)], [], [((12, 17), np.float32)], [])
    (out,) = run(library(), INDEX, how, 1)
    np.testing.assert_array_equal(out[:, :16], 100 * np.arange(12)[:, None] + np.arange(15, -1, -1))
    assert np.isnan(out[:, 16]).all()
    assert np.isnan(run(library(), INDEX, call("static_memory", out=(3,), blocks=3), 0)[0]).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_a_product_of_tensor_cores(seed):
    a, b = (np.random.default_rng(i).integers(-8, 9, (count, 16)) / 8 for i, count in enumerate((16, 8)))
    operands = [x.astype(jnp.bfloat16) for x in (a, b)]
    how = Call("", [Launch("product", (1,), (32,))], operands, [((16, 8), np.float32)], [])
    before = np.repeat(np.tile([[0, 1]], 4), 8, axis=0), np.repeat(np.tile([[2, 3]], 4), 8, axis=0)
    np.testing.assert_array_equal(run(library(), INDEX, how, seed)[0], np.concatenate(before) + a @ b.T)


@pytest.mark.parametrize("seed", [0, 1])
def test_loads_of_matrices(seed):
    x = np.arange(4 * 64, dtype=np.uint16)
    matrices = x.reshape(4, 8, 8)
    for flag, wanted in (("false", matrices), ("true", matrices.swapaxes(1, 2))):
        how = Call("", [Launch(f"matrices<{flag}>", (1,), (32,))], [x], [((32, 4), np.uint32)], [])
        (got,) = run(library(), INDEX, how, seed)
        pairs = np.ascontiguousarray(wanted).view(np.uint32).reshape(4, 32)  # lane 4 r + c: pair c of row r
        np.testing.assert_array_equal(got, pairs.T)


@pytest.mark.parametrize("left", GROUPS_LEFT)
def test_asynchronous_copies(left):
    """Groups of one, two, no and one copies, with an odd seed as late as they may arrive, with an even one as early."""
    x = np.arange(4 * 32 * 4, dtype=np.float32).reshape(4, 32, 4)
    wanted = x[:, ::-1].copy()
    wanted[3, :, 2:] = 0
    for seed in (0, 1, 2, 3):
        (got,) = run(library(), INDEX, call(f"copies<{left}>", x.ravel(), out=x.shape, threads=32), seed)
        arrived = 4 if seed % 2 == 0 else (4, 3, 3, 1, 0)[left]
        np.testing.assert_array_equal(got[:arrived], wanted[:arrived])
        assert np.isnan(got[arrived:]).all()


def test_a_copy_over_what_others_read():
    x = np.arange(128, dtype=np.float32)
    wanted = x.reshape(2, 64)[:, ::-1].ravel()
    for seed in (2, 4, 6):
        got = {
            flag: run(library(), INDEX, call(f"copies_over<{flag}>", x, out=(128,)), seed)[0]
            for flag in ("true", "false")
        }
        np.testing.assert_array_equal(got["true"], wanted)
        assert not np.array_equal(got["false"], wanted)


@pytest.mark.parametrize(
    ("name", "operands", "message"),
    [
        ("misaligned_matrices", [], r"ldmatrix in line \d+: the address of a row is not a multiple of 16"),
        ("misaligned_copies", [X], r"cp.async in line \d+: an address is not a multiple of 16"),
    ],
)
def test_addresses_that_no_gpu_takes(name, operands, message):
    with pytest.raises(RuntimeError, match=message):
        run(library(), INDEX, call(name, *operands, out=(32,), threads=32), 0)


@pytest.mark.parametrize(("name", "count"), [("reverse", 64), ("one_after_the_other", 128)])
def test_a_missing_barrier(name, count):
    right = run(library(), INDEX, call(f"{name}<true>", X, out=(count,)), 0)[0]
    for seed in (1, 2, 3):
        np.testing.assert_array_equal(run(library(), INDEX, call(f"{name}<true>", X, out=(count,)), seed)[0], right)
        wrong = run(library(), INDEX, call(f"{name}<false>", X, out=(count,)), seed)[0]
        assert not np.array_equal(wrong, right)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("divergent_barrier", "met at different barriers: __syncthreads in line"),
        ("barrier_against_shuffle", "never come: 16 at __shfl_xor_sync in line .*, 16 at __syncthreads in line"),
        ("wrong_mask", "the calling lane is not in its own mask"),
        ("different_operations", "lanes of a warp met in different operations"),
        ("product_of_some", "lanes of a warp met in different operations .*: (mma|__syncwarp) in line"),
        ("silent_lane", "reads from lane 3, which takes no part"),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_divergence(name, message, seed):
    with pytest.raises(RuntimeError, match=message):
        run(library(), INDEX, call(name, threads=32), seed)


def test_writes_beyond_the_end():
    with pytest.raises(AssertionError, match="written beyond the end"):
        run(library(), INDEX, call("beyond_the_end", X, scalars=[1]), 0)
    with pytest.raises(AssertionError, match="written before the beginning"):
        run(library(), INDEX, call("beyond_the_end", X, scalars=[-1]), 0)


@pytest.mark.parametrize(
    "how",
    [call("beyond_the_end", X[:63].copy(), scalars=[0]), call("beyond_shared_memory", shared_bytes=256)],
    ids=["a read", "shared memory"],
)
def test_address_sanitizer(how, tmp_path):
    code, output = sanitized(build(SOURCE, ENTRIES, sanitize="address"), INDEX, [how], tmp_path)
    assert code != 0
    assert "AddressSanitizer: heap-buffer-overflow" in output


@pytest.mark.parametrize(("threads", "blocks"), [(1025, 1), (0, 1), (1, 2**31)])
def test_launches_that_no_gpu_accepts(threads, blocks):
    with pytest.raises(RuntimeError, match=r"1 to 1024 threads|1 to 2\^31 - 1 blocks"):
        run(library(), INDEX, call("static_memory", threads=threads, blocks=blocks), 0)


def test_what_does_not_compile():
    with pytest.raises(RuntimeError, match="g\\+\\+ refused"):
        build("__global__ void broken() { nothing(); }", ["broken"])


ENDLESS = {
    "--version": r"g\+\+, which cannot be run \(Command .*--version.* timed out after 3 seconds\)",
    "-std=c++17": r"expected g\+\+ to build endless within 3 seconds; g\+\+ .* did not end\. Run it by hand .* for\.$",
}


@pytest.mark.parametrize("asked", ENDLESS)
def test_a_gpp_that_never_ends(asked, tmp_path, monkeypatch):
    """It is killed with what it has started, and leaves no file."""
    child = endless_compiler(tmp_path / "g++", asked, shutil.which("g++") or "", monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compiler.cache_clear()
    with pytest.raises(NotEmulated, match=ENDLESS[asked]):
        CudaLibrary.built("__global__ void endless() {}", ("endless",), ())
    check_killed(child)
    assert not list(tmp_path.glob("eqxcallback-emulation-*/*"))


def test_builds_are_kept():
    script = "import sys; from eqxcallback.emulation import build; print(build(sys.argv[1], sys.argv[2:]))"
    first = build(SOURCE, ENTRIES)
    made = first.stat().st_mtime_ns
    again = subprocess.run([sys.executable, "-c", script, SOURCE, *ENTRIES], capture_output=True, text=True, check=True)
    assert again.stdout.strip() == str(first)
    assert first.stat().st_mtime_ns == made
