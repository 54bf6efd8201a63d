"""Our ops with their kernels in CUDA C++, launched as on a GPU, on the CPU: the same tests as the CPU's own kernels pass.

Attention is Triton's: tests/triton.
"""

import importlib
import pkgutil
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import CudaKernel, Op, nn, ops

from ..ops import table, test_transformations as transformations
from ..ops.families import by_op, ops_with_kernels, tagged
from ..ops.norm.cases import rms_norm
from ..ops.table import floating, has_backward_kernels, has_kernels, normal
from ..software_gpu.ops import on_software_gpu


F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
MODULES = [
    importlib.import_module(name)
    for _, name, _ in pkgutil.walk_packages(ops.__path__, "eqxcallback.ops.")
    if "_triton" not in name  # its kernels need Triton to be imported
]


def is_ours(value):
    kernels: Any = value.kernels.get("cuda", ()) if isinstance(value, Op) else ()
    return any(isinstance(kernel, CudaKernel) for kernel in kernels)


@pytest.fixture(autouse=True)
def launches(software_gpu, monkeypatch):
    """The driver's log of a test, all of whose ops run their kernels for GPUs."""
    for module in MODULES:
        for name, op in vars(module).items():
            if is_ours(op):
                monkeypatch.setattr(module, name, on_software_gpu(op))
    table.quickly_compiled.cache_clear()
    yield software_gpu
    table.quickly_compiled.cache_clear()


# Read off the ops before their kernels are those of the software GPU.
CUDA = ops_with_kernels("cuda")
# Every function of `ops` has such a call: tests/ops/test_host.py.
CALLED = [row(F32) for row in tagged("python")]
CALLED_CUDA = {getattr(case.op, "func", case.op).__name__ for case in CALLED if has_kernels(case, "cuda")}
CASES = {name: case for name, case in transformations.CASES.items() if has_kernels(case, "cuda")}
# Sizes of two axes that are one are like those of one: what differs between ops is under one `vmap`.
by_few = pytest.mark.parametrize("case", list(CASES.values())[::3], ids=list(CASES)[::3])
HAVE_BACKWARD = [
    name for name in transformations.DERIVED if name in CASES and has_backward_kernels(CASES[name], "cuda")
]


def test_every_op_is_here():
    assert CALLED_CUDA == CUDA == by_op(tagged("cuda")).keys()


# Some shapes: every kernel with all of its sizes and dtypes is in tests/kernels.
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("op", sorted(CUDA))
def test_values(op, dtype, launches):
    for row in by_op(tagged("edge"))[op][:: 8 if dtype == F32 else 24]:
        launches.reset()
        case = row(dtype)
        case.check(np.asarray(jax.jit(case.op)(*case.args)))
        if all(x.size for x in case.args):
            assert launches.launches, f"no kernel ran for {row}"


@pytest.mark.parametrize("case", list(CASES.values())[::2], ids=list(CASES)[::2])
def test_vmap_of_each_operand(case, launches):
    transformations.test_vmap_of_each_operand(case)
    assert launches.launches


@by_few
def test_nested_vmap(case, launches):
    transformations.test_nested_vmap(case)
    assert launches.launches


@pytest.mark.parametrize("name", HAVE_BACKWARD)
def test_gradients_are_those_of_the_kernel(name, launches):
    case = CASES[name]
    numbers = floating(case.args)
    gradients = jax.jit(jax.grad(lambda *args: (case.op(*args) ** 2).sum(), numbers))
    got = gradients(*case.args)
    program = gradients.lower(*case.args).as_text()
    assert program.count("custom_call @eqxcallback_launch_captured") == 2
    of_reference = jax.grad(lambda *args: (case.reference(*args) ** 2).sum(), numbers)
    want = jax.jit(of_reference)(*case.args)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5), got, want)
    batched = [jnp.stack([x, x]) for x in case.args]  # a gradient for each example; forward mode is the reference's
    got, want = jax.jit(jax.vmap(gradients))(*batched), jax.jit(jax.vmap(of_reference))(*batched)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5), got, want)


def test_shared_weights_and_those_of_each_example(launches):
    """`grad(vmap(f))` is one sum by the kernel; `vmap(grad(f))` has a gradient for each example."""
    x, weight = normal(1, (3, 4, 5)), normal(2, (5,))

    def loss(x, weight):
        return (ops.rms_norm(x, weight) ** 2).sum()

    def reference(x, weight):
        return ((x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight) ** 2).sum()

    with jax.numpy_rank_promotion("allow"):
        one = jax.grad(lambda w: jax.vmap(loss, (0, None))(x, w).sum())
        per_example = jax.vmap(jax.grad(loss, 1), (0, None))
        np.testing.assert_allclose(
            jax.jit(one)(weight), jax.grad(lambda w: reference(x, w))(weight), rtol=1e-5, atol=1e-5
        )
        want = jax.vmap(jax.grad(reference, 1), (0, None))(x, weight)
        np.testing.assert_allclose(jax.jit(per_example)(x, weight), want, rtol=1e-5, atol=1e-5)
    assert jax.jit(one).lower(weight).as_text().count("@eqxcallback_launch_captured") == 2


def test_a_norm_of_a_large_row(launches):
    case = rms_norm(F32, (2, 50_257))
    case.check(np.asarray(jax.jit(case.op)(*case.args)))
    gradient = jax.jit(jax.grad(lambda x, w: case.op(x, w).sum(), (0, 1)))(*case.args)
    want = jax.jit(jax.grad(lambda x, w: case.reference(x, w).sum(), (0, 1)))(*case.args)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), gradient, want)


def test_gradients_of_norms_of_two_sizes(launches):
    """One kernel, which has shared memory for its rows: the call that has less of it is loaded last."""

    def gradients(f):
        return jax.jit(jax.grad(lambda x, w: f(x, w).sum(), (0, 1)))

    cases = [rms_norm(F32, (2, size)) for size in (2500, 40)]
    ours, theirs = (
        [gradients(f) for f in of] for of in zip(*((case.op, case.reference) for case in cases), strict=True)
    )
    for i in (0, 1, 0):
        got, want = (f[i](*cases[i].args) for f in (ours, theirs))
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4), got, want)
    shared = [int(line.split("shared=")[1].split()[0]) for line in launches.launches]
    assert len({size for size in shared if size}) == 2


def test_a_product_with_a_gate_has_the_bits_of_two_launches(launches):
    """With a bias between them there are two."""
    x = normal(1, (3, 96), BF16)
    for use_bias, count in ((False, 1), (True, 2)):
        linear = nn.Linear(96, 26, use_bias=use_bias, key=jax.random.key(0))
        layer = nn.QuantizedLinear.from_linear(linear, bits=4)
        want = jax.jit(lambda x, layer=layer: ops.swiglu(jax.vmap(layer)(x)))(x)
        launches.reset()
        got = jax.jit(jax.vmap(layer.then_swiglu))(x)
        assert (got.shape, np.asarray(got).tobytes()) == ((3, 13), np.asarray(want).tobytes())
        assert len(launches.launches) == count


def test_the_whole_of_check(launches):
    x, weight = normal(1, (3, 40)), normal(2, (40,))
    eqxc.testing.check(
        importlib.import_module("eqxcallback.ops.norm._norm")._rms_norm,
        x,
        weight,
        eps=1e-5,
        center=False,
        skip="dtypes",
    )
    assert len(launches.launches) > 50
