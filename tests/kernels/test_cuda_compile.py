"""Every kernel compiled for real GPUs: it compiles, keeps its values in registers, and leaves room for other blocks."""

import pytest

from . import kernels
from .compiling import compiled, unavailable
from .kernels import BF16, DTYPES


pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

# A multiprocessor has 65,536 registers. Resident are three blocks of 256 threads of a backward norm, four of those of swiglu, one
# of 1024 of cross-entropy, and two of 128 of attention, each with the queries of a group.
CEILINGS = {
    "norm.cu": 80,
    "rotary.cu": 128,
    "swiglu.cu": 64,
    "cross_entropy.cu": 64,
    "cache.cu": 64,
    "decode_attention.cu": 255,
    "quantized.cu": 255,
}


# The types of 16 bits differ in two instructions: one of them stands for both on the other architectures.
@pytest.mark.parametrize(("arch", "dtypes"), [("sm_80", [BF16]), ("sm_90", DTYPES), ("sm_100", [BF16])], ids=str)
@pytest.mark.parametrize("file", CEILINGS)
def test_compiled(file, arch, dtypes):
    names = [f"eqxcallback::{name}" for name in kernels.entries(file, dtypes)]
    for name, usage in compiled(kernels.FOLDER / file, names, arch).items():
        assert usage.spilled_bytes == 0, name
        assert usage.registers <= CEILINGS[file], name
        assert usage.shared_bytes <= 48 << 10, name
