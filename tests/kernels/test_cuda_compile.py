"""Every kernel compiled for real GPUs: it compiles, keeps its values in registers, and leaves room for other blocks."""

import pytest

from .. import cuda12
from . import kernels
from .compiling import compiled, unavailable
from .kernels import BF16, F32


pytestmark = [
    pytest.mark.compilers,
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
        assert usage.registers <= CEILINGS.get(file, CEILING), name
        assert usage.shared_bytes <= 48 << 10, name


# Where registers are short, this compiler has a few bytes more on the stack: it is one that users have, not the one tuned for.
@pytest.mark.skipif(not cuda12.IS_TWIN, reason="`make twin` installs NVRTC 12")
@pytest.mark.parametrize("file", kernels.FILES)
def test_compiled_by_cuda_12(file, monkeypatch):
    cuda12.use("nvrtc 12", monkeypatch)
    names = [f"eqxcallback::{name}" for name in kernels.entries(file)]
    for name, usage in compiled(kernels.FOLDER / file, names, "sm_90").items():
        assert usage.spilled_bytes <= 64, name
