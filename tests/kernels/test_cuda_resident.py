"""The number of blocks that a multiprocessor runs at a time: while one waits, memory has to be busy with another."""

import re

import pytest

from eqxcallback.backends._image import Compiled
from eqxcallback.backends._resident import resident_blocks

from . import kernels
from .compiling import compiled, ptx, unavailable
from .test_cuda_cross_entropy import example


pytestmark = [
    pytest.mark.compilers,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]


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
