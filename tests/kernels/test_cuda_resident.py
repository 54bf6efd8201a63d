"""How many blocks a multiprocessor runs at a time: while one waits for its threads, memory has to be busy with another."""

import re

import pytest

from . import kernels
from .compiling import compiled, ptx, unavailable
from .test_cuda_cross_entropy import example


pytestmark = [
    pytest.mark.compilers,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]


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
        assert usage.resident_blocks(threads) >= 2, name


@pytest.mark.parametrize("name", kernels.entries("loss/loss.cu"))
def test_a_row_of_cross_entropy_meets_one_barrier(name):
    text = ptx(kernels.FOLDER / "loss/loss.cu", f"eqxcallback::{name}")
    assert len(re.findall(r"\bbar(?:rier)?\.(?:cta\.)?(?:sync|red)", text)) == 1
