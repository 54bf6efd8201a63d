"""Kernels in Triton that cannot run, and what is said of them before a launch."""

import jax
import jax.numpy as jnp
import pytest


pytest.importorskip("triton", reason="Triton is not installed")

import triton

import eqxcallback as eqxc

from ..testing.triton_refused import calls_what_is_not_compiled, products, two_at_once


pytestmark = pytest.mark.usefixtures("triton_cache")


def lowered(arch: str, width: int):
    out = jax.ShapeDtypeStruct((128, width), jnp.float32)
    kernel = eqxc.TritonKernel(
        products, grid=1, out_type=lambda x: out, constexprs={"SIZE": 256, "WIDTH": width}, num_warps=8, arch=arch
    )
    op, x = eqxc.Op("products", kernels={"cuda": kernel}), jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    return jax.jit(op).trace(x).lower(lowering_platforms=("cuda",))


def test_more_tensor_memory_than_there_is():
    with pytest.raises(
        ValueError,
        match=r"products\[triton\]: expected products to need at most 512 columns of tensor memory, all that sm_100 has; "
        r"got 768\. Take smaller blocks",
    ):
        lowered("sm_100", 256)


@pytest.mark.parametrize(("arch", "width"), [("sm_100", 128), ("sm_90", 128)])
def test_as_much_tensor_memory_as_there_is(arch, width):
    assert "eqxcallback_launch" in lowered(arch, width).as_text()


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (two_at_once, "Simultaneous multiple assignment is not supported"),
        (calls_what_is_not_compiled, "Unsupported function referenced"),
    ],
)
def test_functions_that_triton_cannot_read(fn, why):
    where = "Write it in the part of Python that Triton has"
    with pytest.raises(
        ValueError, match=rf"TritonKernel\({fn.__name__}\): expected fn to be .* it says: {why}.*{where}"
    ):
        eqxc.TritonKernel(triton.jit(fn.fn), grid=1)  # Triton looks once at each
