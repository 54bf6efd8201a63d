"""Every kernel compiled for real GPUs: it compiles, keeps its values in registers, and leaves room for other blocks.

How many blocks a multiprocessor runs at a time: while one waits, memory has to be busy with another.
"""

import itertools
import re
from typing import Any

import jax
import numpy as np
import pytest

from eqxcallback.backends._image import Compiled
from eqxcallback.backends._resident import resident_blocks

from .. import cuda12
from . import kernels
from .compiling import compiled, ptx, unavailable
from .kernels import BF16, F32, decode_mma_cuda, linear_cuda
from .test_cuda_cross_entropy import example


pytestmark = [
    pytest.mark.compilers,
    pytest.mark.compiled_code,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

# A multiprocessor has 65,536 registers: enough for a block of 1024 threads, two of 512 of cross-entropy, or four of 256. Of a
# backward norm three blocks of 256 are resident, and two of 128 of attention, each with the queries of a group.
CEILING = 64
CEILINGS = {
    "norm/norm.cu": 80,
    "norm/group_norm.cu": 96,
    "norm/group_norm_parts.cu": 128,
    "rotary/rotary.cu": 128,
    "recurrent/recurrent.cu": 128,
    "attention/decode.cu": 255,
    "attention/decode_backward.cu": 255,
    "attention/decode_mma.cu": 255,
    "linear/quantized.cu": 255,
    "linear/quantized_mma.cu": 255,
}
# The forward norms of few rows, of which a multiprocessor has one block.
READS_AHEAD = 128

in_the_twin = pytest.mark.skipif(not cuda12.IS_TWIN, reason="`make twin` compiles for them")


# The types of 16 bits differ in two instructions: one of them stands for both.
@pytest.mark.parametrize(
    ("arch", "dtypes"),
    [
        ("sm_90", [F32, BF16]),
        *(pytest.param(arch, [BF16], marks=in_the_twin) for arch in ("sm_80", "sm_100")),
    ],
    ids=str,
)
@pytest.mark.parametrize("file", kernels.FILES)
def test_compiled(file, arch, dtypes):
    names = [f"eqxcallback::{name}" for name in kernels.entries(file, dtypes)]
    for name, usage in compiled(kernels.FOLDER / file, names, arch).items():
        assert usage.spilled_bytes == 0, name
        ceiling = READS_AHEAD if name.endswith(", true>") and "normalize<" in name else CEILINGS.get(file, CEILING)
        assert usage.registers <= ceiling, name
        assert usage.shared_bytes <= 48 << 10, name


# Where registers are short, this compiler has a few bytes more on the stack: it is one that users have, not the one tuned for.
@pytest.mark.skipif(not cuda12.IS_TWIN, reason="`make twin` installs NVRTC 12")
@pytest.mark.parametrize("file", kernels.FILES)
def test_compiled_by_cuda_12(file, monkeypatch):
    cuda12.use("nvrtc 12", monkeypatch)
    names = [f"eqxcallback::{name}" for name in kernels.entries(file)]
    for name, usage in compiled(kernels.FOLDER / file, names, "sm_90").items():
        assert usage.spilled_bytes <= 64, name


def _resident(arch, usage, threads, shared_bytes=0):
    of_image = Compiled((), usage.registers, 0, usage.shared_bytes)
    return resident_blocks(int(arch.removeprefix("sm_")), of_image, threads, shared_bytes)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_rows_of_cross_entropy_overlap(arch):
    (launch,) = kernels.cross_entropy(*example((3, 40_000), kernels.F32)).launches
    threads, *rows = launch.block
    assert 256 <= threads <= 512
    assert rows == [1, 1]
    names = [f"eqxcallback::{name}" for name in kernels.entries("loss/loss.cu")]
    for name, usage in compiled(kernels.FOLDER / "loss/loss.cu", names, arch).items():
        assert usage.registers <= 64, name
        assert usage.spilled_bytes == 0, name
        assert _resident(arch, usage, threads) >= 2, name


@pytest.mark.parametrize("name", kernels.entries("loss/loss.cu"))
def test_a_row_of_cross_entropy_meets_one_barrier(name):
    text = ptx(kernels.FOLDER / "loss/loss.cu", f"eqxcallback::{name}")
    assert len(re.findall(r"\bbar(?:rier)?\.(?:cta\.)?(?:sync|red)", text)) == 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_four_query_heads_have_four_blocks(arch):
    """One token over a cache. In f32 with slopes or a soft cap three, and of a cache in int8 two."""
    file = "attention/decode.cu"
    names = [f"eqxcallback::{name}" for name in kernels.entries(file) if ", 4, " in name]
    residents = {
        name: (usage, _resident(arch, usage, 128, (256 + 2) * 16))
        for name, usage in compiled(kernels.FOLDER / file, names, arch).items()
    }
    for name, (usage, blocks) in residents.items():
        if ", 4, 8, " in name:
            assert usage.spilled_bytes == 0, name
            assert blocks >= (3 if name.endswith("<float, float, 4, 8, true, true>") else 4), name
        else:
            assert blocks == 2, name
        assert "__nv_bfloat16, 4, 8" not in name or usage.registers <= 128, name


@pytest.mark.parametrize(("arch", "least"), [("sm_80", 2), ("sm_90", 3), ("sm_86", 1)])
def test_blocks_of_decode_by_tensor_cores(arch, least):
    """Registers are enough for three, and so is shared memory on 9.0; that of 8.0 is for two, and that of 8.6 for one."""
    file = "attention/decode_mma.cu"
    names = [f"eqxcallback::{name}" for name in kernels.entries(file) if "mma<" in name]
    launches: Any = decode_mma_cuda.DECODE_ATTENTION_MMA.launch
    for name, usage in compiled(kernels.FOLDER / file, names, arch).items():
        assert usage.spilled_bytes == 0, name
        _, cache, size = name.partition("<")[2].split(", ")[:3]
        q, kv = (jax.ShapeDtypeStruct((1, 4, int(size)), d) for d in (BF16, np.int8 if "char" in cache else BF16))
        first = launches[0]
        shared, threads = first.shared_bytes(q, (kv, kv)), first.block(q, (kv, kv))
        assert shared <= 99 << 10, name
        assert _resident(arch, usage, threads, shared) >= least, name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_two_blocks_of_products_by_tensor_cores(arch):
    file = "linear/quantized_mma.cu"
    names = [f"eqxcallback::{name}" for name in kernels.entries(file)]
    for name, usage in compiled(kernels.FOLDER / file, names, arch).items():
        assert usage.spilled_bytes == 0, name
        assert _resident(arch, usage, 128) >= 2, name


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_86"])
@pytest.mark.parametrize("encoding", list(linear_cuda._STRIDE_BY_MMA))
def test_shared_memory_of_products_by_tensor_cores(encoding, arch):
    """As much as is left beside the registers: for eight warps on servers, and for four elsewhere."""
    kernel: Any = linear_cuda.QUANTIZED_LINEAR_MMA
    (launch,) = kernel.launch
    for rows, weights in itertools.product((1, 8, 16, 32, 64), (4096, 14_336)):
        x, blocks = jax.ShapeDtypeStruct((rows, 4096), BF16), jax.ShapeDtypeStruct((weights, 4096), np.uint8)
        name = kernel.entry(x, blocks, encoding=encoding)
        usage = compiled(kernel.source, [name], arch)[name]
        threads, shared = (of(x, blocks, encoding=encoding) for of in (launch.block, launch.shared_bytes))
        warps = _resident(arch, usage, threads, shared) * threads // 32
        assert warps >= (4 if arch == "sm_86" else 8), name
