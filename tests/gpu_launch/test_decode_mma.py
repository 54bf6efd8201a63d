"""The attention of one token by tensor cores, launched as on a GPU, on the CPU."""

import jax
import numpy as np
import pytest

from benchmarks import programs

from ..ops.attention.cases import decode_attention
from ..ops.table import DTYPES, quickly_compiled, wide
from ..software_gpu.ops import on_software_gpu


BF16 = DTYPES[1]


@pytest.mark.parametrize(("keys", "launches"), [(64, 1), (65, 2)])
def test_one_part_is_one_launch(keys, launches, software_gpu, monkeypatch):
    """A cache that is no longer than a part, and one that is."""
    monkeypatch.setattr(programs, "_BY_TENSOR_CORES", on_software_gpu(programs._BY_TENSOR_CORES))
    case = decode_attention(BF16, (2,), keys, 6, 2, 64, (keys, 3))
    got = np.asarray(jax.jit(lambda *args: programs.decode_by_tensor_cores(*args))(*case.args), np.float32)
    want = np.asarray(quickly_compiled(case.reference)(*map(wide, case.args)))
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-7)
    joining = ["block=(32,8,1)" in launch for launch in software_gpu.launches]
    assert joining == [False, True][:launches]
