"""Every op's kernel for GPUs in XLA's plan: captured, and without a copy."""

import re

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc
from benchmarks.programs import BY_TENSOR_CORES, PROGRAMS, struct
from eqxcallback import ops, xla
from eqxcallback.backends import _cuda

from .. import cuda12
from ..ops.families import ops_with_backward_kernels
from ..ops.table import kernels_of
from .programs import ONE, calls_of, thunks


EVERY = {**PROGRAMS, **BY_TENSOR_CORES}
by_program = pytest.mark.parametrize("program", EVERY.values(), ids=list(EVERY))
DIFFERENTIABLE = {name: program for name, program in PROGRAMS.items() if program.differentiable}


def test_those_with_backward_kernels_are_differentiated():
    backward = {*ops_with_backward_kernels("cuda"), *ops_with_backward_kernels("triton")}
    assert {name.split()[0] for name in DIFFERENTIABLE} == backward & {name.split()[0] for name in PROGRAMS}


@pytest.fixture(scope="module", params=cuda12.COMPILERS)
def nvrtc(request):
    """The compiler of CUDA C++: the environment's own, and then that of CUDA 12 where it is installed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        cuda12.use(request.param, monkeypatch)
        _forget()
        yield request.param
    _forget()


def _forget():
    """The programs of one compiler are not those of another."""
    _cuda.compiled_source.cache_clear()
    jax.clear_caches()


def copies(compiled):
    return [thunk for thunk in thunks(compiled) if "copy" in thunk.kind.lower() or "Memcpy" in thunk.kind]


@pytest.mark.usefixtures("nvrtc")
@by_program
def test_captured_without_a_copy(program):
    f, args = program.function, program.args
    compiled = xla.compile_deviceless(f, *args, donate_argnums=program.donated, compiler_options=ONE)
    calls = [thunk for thunk in thunks(compiled) if thunk.kind == "kCustomCall"]
    assert [thunk.buffer is not None for thunk in calls] == [True]
    assert not copies(compiled)


def test_who_compiled(nvrtc):
    """The release is in the PTX, which a program for no GPU in particular has."""
    program = PROGRAMS["rms_norm"]
    lowered = jax.jit(program.function).trace(*program.args).lower(lowering_platforms=("cuda",))
    images = re.findall(r'images = dense<"0x([0-9A-F]*)"', lowered.as_text())
    releases = {release for image in images for release in re.findall(rb"release (\d+)", bytes.fromhex(image))}
    assert releases == {b"12" if nvrtc == "nvrtc 12" else b"13"}


def test_alone_it_is_too_small():
    program = PROGRAMS["rms_norm"]
    assert calls_of(program.function, *program.args) == [False]


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("program", DIFFERENTIABLE.values(), ids=list(DIFFERENTIABLE))
def test_gradients_are_captured(program):
    gradients = program.gradients
    assert calls_of(gradients.function, *gradients.args, **ONE) == [True, True]


@by_program
def test_inspect_says_so(program):
    report = eqxc.inspect(eqxc.jit_captured(program.function), *program.args, platform="cuda")
    (call,) = report.calls
    assert call.lane == "native"
    assert call.target == "eqxcallback_launch_captured"
    assert call.captured is True


def test_gradients_of_a_cache_copy_nothing():
    """Two rows are appended in place, and become zero in place in the gradient of the cache."""

    def loss(cache, rows, position):
        for i in range(2):
            cache = ops.cache_append(cache, rows, position + i)
        return jnp.tanh(cache.astype(jnp.float32)).sum()

    args = struct(4096, 2, 64), struct(1, 2, 64), struct(dtype=jnp.int32)
    compiled = xla.compile_deviceless(jax.value_and_grad(loss, (0, 1)), *args, donate_argnums=0, compiler_options=ONE)
    assert [thunk.kind for thunk in thunks(compiled)].count("kCustomCall") == 2
    assert not copies(compiled)


def test_float16():
    x = struct(2, 64, 4, 64, dtype=jnp.float16)
    assert calls_of(lambda q: ops.attention(q, q, q), x, **ONE) == [True]
    assert calls_of(lambda x: ops.rms_norm(x), x, **ONE) == [True]


@pytest.mark.parametrize(("op", "size"), [(ops.attention, 257), (ops.decode_attention, 1025)])
def test_heads_that_are_too_large_are_products_of_xla(op, size):
    if op is ops.attention:
        args = struct(2, 8, 4, size), struct(2, 8, 2, size), struct(2, 8, 2, size)
    else:
        args = struct(2, 4, size), struct(2, 8, 2, size), struct(2, 8, 2, size), struct(2, dtype=jnp.int32)
    assert calls_of(op, *args, **ONE) == []
    assert kernels_of(op, *args) == ["jax"], "not the definition, which is no call either"


def test_a_kernel_whose_warps_do_different_work():
    """Its descriptors are in memory that XLA plans, and that is not copied."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from ..testing.triton_hopper import A, B, matmul_op

    op = matmul_op()
    compiled = xla.compile_deviceless(lambda a, b: op(a, b), A, B, compiler_options=ONE)
    assert [thunk.buffer is not None for thunk in thunks(compiled) if thunk.kind == "kCustomCall"] == [True]
    assert not copies(compiled)
