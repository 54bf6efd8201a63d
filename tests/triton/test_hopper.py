"""Launches of kernels in Triton for GPUs since Hopper: with as many warps, and as much memory, as Triton's compiler says."""

import jax
import jax.numpy as jnp
import pytest


pytest.importorskip("triton", reason="Triton is not installed")

import eqxcallback as eqxc

from ..gpu_launch.cuda_programs import attributes
from ..testing.triton_hopper import A, B, increment_in_gluon, increment_op, matmul_op


pytestmark = pytest.mark.usefixtures("triton_cache")

X = jax.ShapeDtypeStruct((4096,), jnp.float32)


def lowered(op, *args):
    return jax.jit(lambda *args: op(*args)).trace(*args).lower(lowering_platforms=("cuda",))


def test_warps_that_the_compiler_adds_and_memory_that_it_wants():
    program = lowered(matmul_op(), A, B)
    launch = attributes(program)
    x, y, z, *block, shared, _ = launch["geometry"].tolist()
    assert (x, y, z) == (2, 3, 1)
    assert block == [384, 1, 1]  # num_warps=4, and two groups of as many for what it gives them to do
    assert shared > 100_000
    assert launch["scalars"].tolist() == [
        256,
        384,
        192,
        0,
        0,
    ]  # then scratch memory of the compiler, and of its profiler
    assert launch["scratch"].tolist() == [3, 0]
    # 128 bytes for each of three descriptors, and for another one, of each of 6 programs.
    assert "-> (tensor<256x384xf16>, tensor<3072xui8>)" in program.as_text()
    assert "attributes" not in launch


def test_clusters_and_programmatic_launches():
    launch = attributes(lowered(increment_op(num_ctas=2, launch_pdl=True), X))
    assert launch["geometry"].tolist()[:6] == [8, 1, 1, 128, 1, 1]  # Triton counts clusters
    assert launch["attributes"].tolist() == [2, 1, 1, 0, 1, 1]
    chosen = attributes(lowered(increment_op(choose=lambda arch, x: {"launch_cooperative_grid": True}), X))
    assert chosen["attributes"].tolist() == [1, 1, 1, 1, 0, 0]
    assert increment_op(num_ctas=2) != increment_op()


def test_clusters_on_an_old_device():
    with pytest.raises(
        ValueError, match=r"increment does not compile for sm_80: .*num_ctas > 1 requires NVIDIA SM90\+"
    ):
        lowered(increment_op(num_ctas=2, arch="sm_80"), X)


@pytest.mark.parametrize("num_warps", [4, 8])
def test_gluon(num_warps):
    launch = attributes(lowered(increment_op(increment_in_gluon, num_warps=num_warps), X))
    assert launch["geometry"].tolist()[:6] == [4, 1, 1, 32 * num_warps, 1, 1]
    assert launch["entries"] == "increment_in_gluon"


def test_gluon_is_not_emulated():
    f = eqxc.testing.emulated(increment_op(increment_in_gluon))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="interpreter does not run increment_in_gluon, which is written in Gluon"
    ):
        jax.block_until_ready(f(jnp.ones(4096)))
