"""Kernels in Triton that only GPUs since Hopper run."""

# Triton's annotations are those of its compiler.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

import eqxcallback as eqxc


F16 = jnp.float16


@triton.jit
def matmul(a, b, out, M, N, K, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Some warps copy tiles, the others multiply them. Descriptors are written to memory of Triton's own."""
    left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK, DEPTH])
    right = tl.make_tensor_descriptor(b, [K, N], [N, 1], [DEPTH, BLOCK])
    result = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BLOCK, BLOCK])
    i, j = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in tl.range(0, K, DEPTH, warp_specialize=True):
        total = tl.dot(left.load([i, k]), right.load([k, j]), total)
    result.store([i, j], total.to(tl.float16))


@triton.jit
def increment(x, out, BLOCK: tl.constexpr):
    gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + 1)


@gluon.jit
def increment_in_gluon(x, out, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    gl.store(out + at, gl.load(x + at) + 1)


def matmul_op(**changed) -> eqxc.Op:
    fields = {
        "grid": lambda a, b, *, BLOCK, **_: (a.shape[0] // BLOCK, b.shape[1] // BLOCK),
        "scalars": {
            "M": ("int32", lambda a, b: a.shape[0]),
            "N": ("int32", lambda a, b: b.shape[1]),
            "K": ("int32", lambda a, b: a.shape[1]),
        },
        "constexprs": {"BLOCK": 128, "DEPTH": 64},
        "arch": "sm_90",
    }
    kernel = eqxc.TritonKernel(matmul, **{**fields, **changed})
    return eqxc.Op("matmul", kernels={"cuda": kernel}, reference=lambda a, b: (a @ b).astype(F16))


A, B = jax.ShapeDtypeStruct((256, 192), F16), jax.ShapeDtypeStruct((192, 384), F16)


def increment_op(fn=increment, **changed) -> eqxc.Op:
    fields = {"grid": lambda x, *, BLOCK: x.size // BLOCK, "constexprs": {"BLOCK": 1024}, "arch": "sm_90"}
    kernel = eqxc.TritonKernel(fn, **{**fields, **changed})
    return eqxc.Op("increment", kernels={"cuda": kernel}, reference=lambda x: x + 1)
