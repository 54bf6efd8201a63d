"""Kernels in Triton that sum up rows, and one of elements."""

import jax
import triton
import triton.language as tl

import eqxcallback as eqxc


FACTOR = tl.constexpr(2)


@triton.jit
def doubled(value):
    return FACTOR * value


@triton.jit
def row_sums(x, out, size, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * size + columns, mask=columns < size, other=0)
    tl.store(out + tl.program_id(0), doubled(tl.sum(row, axis=0)))


@triton.jit
def wrong_sums(x, out, size, BLOCK: tl.constexpr):
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + tl.program_id(0) * size + tl.arange(0, BLOCK)), axis=0))


@triton.jit
def beyond(x, out, size, BLOCK: tl.constexpr):
    tl.store(out + tl.program_id(0) + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32))


@triton.jit
def raises(x, out, size, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 1, "one element at a time")
    tl.store(out, 0.0)


@triton.jit
def affine(shift, x, out, size, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    tl.store(out + at, factor * tl.load(x + at, mask=there) + tl.load(shift + at, mask=there), mask=there)


@triton.jit
def doubles(x, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < size), mask=at < size)


@triton.jit
def scaled(x, out, BLOCK: tl.constexpr, FACTOR: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, FACTOR * tl.load(x + at))


@triton.autotune(configs=[triton.Config({"BLOCK": 8})], key=[])
@triton.jit
def tuned(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


def sums_of(fn) -> eqxc.Op:
    def size(x):
        return x.shape[-1]

    kernel = eqxc.TritonKernel(
        fn, grid=lambda x, BLOCK: x.size // size(x), scalars={"size": ("int32", size)}, constexprs={"BLOCK": 16}
    )
    return eqxc.Op("sums", kernels={"cuda": kernel}, reference=reference, vmap_method="broadcast_all")


def reference(x: jax.Array) -> jax.Array:
    return 2 * x.sum(-1)
