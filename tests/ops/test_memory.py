"""The elements that kernels write: every one."""

import contextlib
import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from ..transform.library import SAXPY, build_saxpy
from .families import tagged
from .table import DTYPES


M_PERTURB = -6  # of malloc.h
PATTERN = 0x7F  # 3e38, as f32 and as bf16: no kernel computes it from numbers near 1


@contextlib.contextmanager
def poisoned_memory():
    """Memory comes filled with the pattern, results of programs among it."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        pytest.skip("this C library has no mallopt to fill memory with")
    libc.mallopt(M_PERTURB, PATTERN ^ 0xFF)
    try:
        yield
    finally:
        libc.mallopt(M_PERTURB, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", tagged("written"), ids=str)
def test_every_element_is_written(row, dtype, isa):
    case = row(dtype)
    want = case.want()
    result = jax.ShapeDtypeStruct(want.shape, case.dtype or dtype)
    build_saxpy()
    leave = eqxc.Op("leave", {"cpu": eqxc.NativeKernel("Leave", SAXPY, out_type=lambda x: result)})
    untouched = jax.jit(leave).lower(case.args[0]).compile()
    op = jax.jit(case.op).lower(*case.args).compile()
    args = [jnp.asarray(x) for x in case.args]
    with poisoned_memory():
        before, got = np.array(untouched(args[0])), np.array(op(*args))
    assert set(before.tobytes()) == {PATTERN}  # or this test could not fail
    case.check(got, want)
