"""A kernel in Triton, compiled to an image."""

import triton
import triton.language as tl


@triton.jit
def twice(x, out, n, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)
