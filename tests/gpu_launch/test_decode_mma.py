"""The attention of one token by tensor cores, launched as on a GPU, on the CPU."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import programs
from eqxcallback.ops.attention import _cuda_decode_mma as decode_mma_cuda

from ..ops.attention.cases import decode_attention
from ..ops.table import DTYPES, quickly_compiled, wide
from ..software_gpu.ops import on_software_gpu


BF16 = DTYPES[1]


def attend(keys, monkeypatch, kernels, name="decode_attention"):
    """As the definition does, by these kernels. Which of them an op of a name takes is chosen once in a process."""
    op = dataclasses.replace(programs._BY_TENSOR_CORES, kernels={"cuda": kernels}, name=name)
    monkeypatch.setattr(programs, "_BY_TENSOR_CORES", on_software_gpu(op))
    case = decode_attention(BF16, (2,), keys, 6, 2, 64, (keys, 3))
    got = np.asarray(jax.jit(lambda *args: programs.decode_by_tensor_cores(*args))(*case.args), np.float32)
    want = np.asarray(quickly_compiled(case.reference)(*map(wide, case.args)))
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(("keys", "launches"), [(32, 1), (33, 2)])
def test_one_part_is_one_launch(keys, launches, software_gpu, monkeypatch):
    """A cache that is no longer than a part, and one that is."""
    attend(keys, monkeypatch, decode_mma_cuda.DECODE_ATTENTION_MMA)
    joining = ["block=(32,8,1)" in launch for launch in software_gpu.launches]
    assert joining == [False, True][:launches]


@pytest.mark.parametrize(("arch", "overlaps"), [("sm_80", False), ("sm_90", True)])
def test_the_second_launch_overlaps_the_first(arch, overlaps, software_gpu, monkeypatch):
    """On devices that have such launches, and the first one follows what is ahead of it."""
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", arch)
    kernels = decode_mma_cuda.DECODE_ATTENTION_MMA_OVERLAPPED, decode_mma_cuda.DECODE_ATTENTION_MMA
    attend(65, monkeypatch, kernels, f"decode_attention_{arch}")
    assert ["programmatic=1" in launch for launch in software_gpu.launches] == [False, overlaps]
