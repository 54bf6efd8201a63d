"""Kernels in Triton that cannot run on any GPU, or on none with so large a block."""

# Triton's annotations are those of its compiler.
# pyright: reportArgumentType=false

import jax.numpy as jnp
import triton
import triton.language as tl


@triton.jit
def products(x, out, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Multiply. On a GPU since sm_100, each of the three sums has as many columns of tensor memory as it is wide."""
    rows, columns = tl.arange(0, 128)[:, None], tl.arange(0, WIDTH)[None, :]
    depth = tl.arange(0, 64)
    one = tl.zeros((128, WIDTH), tl.float32)
    two = tl.zeros((128, WIDTH), tl.float32)
    three = tl.zeros((128, WIDTH), tl.float32)
    for at in range(0, SIZE, 64):
        left = tl.load(x + rows * SIZE + at + depth[None, :])
        right = tl.load(x + at + depth[:, None] + columns * SIZE)
        one = tl.dot(left, right, one)
        two = tl.dot(left, right + 1, two)
        three = tl.dot(left, right + 2, three)
    tl.store(out + rows * WIDTH + columns, one + two * 2 + three * 3)


@triton.jit
def two_at_once(x, out):
    first = second = tl.load(x)
    tl.store(out, first + second)


@triton.jit
def calls_what_is_not_compiled(x, out):
    tl.store(out, jnp.sin(tl.load(x)))
