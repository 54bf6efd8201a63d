"""What kernels write, and what memory they need: every element, and not more than that."""

import contextlib
import ctypes
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import ops

from ..op.library import SAXPY, build_saxpy
from . import cases
from .cases import DTYPES, normal, one_of_each


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
@pytest.mark.parametrize("index", range(len(one_of_each(DTYPES[0]))))
def test_every_element_is_written(index, dtype, isa):
    case = one_of_each(dtype)[index]
    want = case.want()
    result = jax.ShapeDtypeStruct(want.shape, case.dtype or dtype)
    build_saxpy()
    leave = eqxc.Op("leave", {"cpu": eqxc.NativeKernel("Leave", SAXPY, out_type=lambda x: result)})
    untouched = jax.jit(leave).lower(case.args[0]).compile()
    op = jax.jit(case.op).lower(*case.args).compile()
    args = cases.jax_args(case)
    with poisoned_memory():
        found, got = np.array(untouched(args[0])), np.array(op(*args))
    assert set(found.tobytes()) == {PATTERN}  # or this test could not fail
    case.check(got, want)


def peak(f, *args):
    """How many bytes more than before are in use while `f(*args)` runs."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use

    def read(key):
        status = pathlib.Path("/proc/self/status").read_text()
        return 1024 * int(status.split(f"{key}:")[1].split()[0])

    before = read("VmRSS")
    jax.block_until_ready(f(*args))
    return read("VmHWM") - before


def compiled(f, *args) -> Any:
    program = jax.jit(f).lower(*args).compile()
    jax.block_until_ready(program(*args))
    return program


@pytest.mark.parametrize("causal", [True, False])
def test_attention_makes_no_array_of_queries_times_keys(causal):
    length = 4096
    q, k, v = (normal(seed, (length, 1, 8)) for seed in range(3))
    program = compiled(lambda q, k, v: ops.attention(q, k, v, causal=causal), q, k, v)
    assert program.memory_analysis().temp_size_in_bytes < 2**20
    assert f"{length},{length}" not in program.as_text()
    assert peak(program, q, k, v) < 4 * length**2 / 8


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_derivatives_of_attention_make_none_either(implementation):
    """With every option that brings no such array along."""
    length = 4096
    q, k, v = (normal(seed, (length, 1, 8)) for seed in range(3))
    segments, slopes = np.zeros(length, np.int32), np.ones(1, np.float32)

    def f(q, k, v, slopes, key):
        return ops.attention(
            *(q, k, v),
            **{"causal": True, "window": 900, "soft_cap": 3.0, "alibi_slopes": slopes, "segment_ids": segments},
            **{"lengths": length - 3, "dropout": 0.1, "key": key, "implementation": implementation},
        )

    def gradients(*args):
        return jax.grad(lambda *args: jnp.sin(f(*args)).sum(), (0, 1, 2, 3))(*args)

    def second(*args):
        return jax.grad(lambda *args: sum(jnp.sin(x).sum() for x in gradients(*args)), (0, 1, 2, 3))(*args)

    for function in (f, gradients, second):
        program: Any = cases.quickly_compiled(function).lower(q, k, v, slopes, jax.random.key(0)).compile()
        assert program.memory_analysis().temp_size_in_bytes < 4 * length**2 / 3
        assert f"{length},{length}" not in program.as_text()


@pytest.mark.parametrize("encoding", ops.ENCODINGS)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_weights_are_never_expanded(encoding, batch, isa):
    in_features, out_features = 4096, 4096
    blocks = jnp.ones((out_features, in_features // 32 * ops.ENCODINGS[encoding]), jnp.uint8)
    x = jnp.ones((*batch, in_features))
    program = compiled(lambda x, blocks: ops.quantized_linear(x, blocks, encoding=encoding), x, blocks)
    assert program.memory_analysis().temp_size_in_bytes < 2**20
    assert f"[{out_features},{in_features}]" not in program.as_text()
    assert peak(program, x, blocks) < 4 * in_features * out_features / 8
