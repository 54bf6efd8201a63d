"""Attention, in Triton, on a real GPU: its tensor cores, all head sizes, edges, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from ..ops import cases, test_transformations as transformations
from .conftest import require_gpu
from .values import BF16, DTYPES, F16, F32, close, kernels_in, on_device, tolerate_products, wide


pytestmark = pytest.mark.gpu

require_gpu()


def identified(made):
    return f"{made[0]}-{cases.name(cases.attention, *made[1:])}"


EDGES = [
    (dtype, *arguments) for dtype in DTYPES for arguments in cases.SHAPES[cases.attention][:: 4 if dtype == F16 else 1]
]
# (batch), queries, keys, heads, kv_heads, size, causal
REAL = [
    *[((2,), 384, 384, 4, 2, size, causal) for size in (64, 80, 96, 128, 256) for causal in (True, False)],
    ((1,), 2048, 2048, 8, 2, 128, True),
    ((2,), 1000, 1500, 6, 3, 64, True),  # a prompt after a cache, blocks that are not full
    ((1,), 1500, 1000, 2, 1, 128, True),  # queries that see no key
    ((1,), 1, 4096, 32, 8, 128, True),
    ((2,), 40, 777, 9, 3, 64, False),
]
F16_SIZES = (64, 96)
LARGE = [
    *[(BF16, *made) for made in REAL],
    *[(F16, *made) for made in REAL if made[-2] in F16_SIZES],
    *[(F32, *made) for made in REAL[::3]],
]
# Three kernels each, which take seconds to compile: not all that a forward kernel is tried with.
DIFFERENTIATED = [
    *[(BF16, *made) for made in REAL if made[-1]],
    *[(BF16, *made) for made in REAL if not made[-1] and made[-2] in (64, 128)],
    *[(F16, *made) for made in REAL[:1]],
    *[(F32, *made) for made in (REAL[0], REAL[6])],
]


def check(case, want):
    if all(x.size for x in case.args):
        assert kernels_in(case.op, *case.args) == 1
    got = np.asarray(jax.jit(case.op)(*case.args))
    assert got.dtype == case.args[0].dtype
    tolerate_products(got, want, case.terms)


@pytest.mark.parametrize("made", EDGES, ids=identified)
def test_edge_sizes(made):
    case = cases.attention(*made)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        want = np.asarray(cases.quickly_compiled(case.definition)(*map(wide, case.args)))
    check(case, want)


@pytest.mark.parametrize("made", LARGE, ids=identified)
def test_sizes_of_models(made):
    case = cases.attention(*made)
    check(case, on_device(case.definition, *map(wide, case.args)))


@pytest.mark.parametrize("made", DIFFERENTIATED, ids=identified)
def test_gradients(made):
    case = cases.attention(*made)
    cotangent = cases.normal(9, case.args[0].shape, made[0])

    def gradients(f):
        return lambda cotangent, *args: jax.vjp(f, *args)[1](cotangent)

    assert kernels_in(gradients(case.op), cotangent, *case.args) == 2
    got = jax.jit(gradients(case.op))(cotangent, *case.args)
    want = on_device(gradients(case.definition), wide(cotangent), *map(wide, case.args))
    for g, w in zip(got, want, strict=True):
        assert g.dtype == made[0]
        tolerate_products(g, w, case.terms)


def test_large_logits_are_no_overflow():
    q, k, v = (cases.normal(i, (1, 200, 2, 64), BF16, 30.0 if i < 3 else 1.0) for i in (1, 2, 3))
    got = np.asarray(jax.jit(lambda q, k, v: ops.attention(q, k, v, causal=True))(q, k, v), np.float32)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[:, 0], np.asarray(v, np.float32)[:, 0], rtol=2**-7)  # the first sees one key


def test_attention_under_vmap_and_scan():
    """Shared keys stay one; a scan runs the same kernel again."""
    q = cases.normal(1, (3, 2, 130, 4, 64), BF16)
    k, v = (cases.normal(i, (2, 130, 2, 64), BF16) for i in (2, 3))
    want = np.stack([np.asarray(jax.jit(ops.attention)(row, k, v), np.float32) for row in q])
    mapped = jax.jit(jax.vmap(ops.attention, (0, None, None)))(q, k, v)
    scanned = jax.jit(lambda q: jax.lax.scan(lambda _, row: (None, ops.attention(row, k, v)), None, q)[1])(q)
    close(mapped, want, rtol=2**-7, atol=2**-9)
    close(scanned, want, rtol=2**-7, atol=2**-9)


CASES = {name: case for name, case in transformations.CASES.items() if name.startswith("attention")}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


@pytest.fixture
def device_tolerance(monkeypatch):
    monkeypatch.setattr(cases, "tolerate", tolerate_products)
    monkeypatch.setattr(cases, "quickly_compiled", jax.jit)


@pytest.mark.usefixtures("device_tolerance")
@by_case
def test_vmap_of_each_operand(case):
    transformations.test_vmap_of_each_operand(case)


@pytest.mark.usefixtures("device_tolerance")
@by_case
def test_nested_vmap(case):
    transformations.test_nested_vmap(case)


@pytest.mark.usefixtures("device_tolerance")
@by_case
def test_derivatives(case):
    transformations.test_derivatives(case)


def test_f32_is_not_tf32():
    """Its products have f32's precision, also where tensor cores would round it to 10 bits."""
    case = cases.attention(F32, (1,), 256, 256, 2, 2, 64)
    want = on_device(case.definition, *case.args)
    got = np.asarray(jax.jit(case.op)(*case.args))
    assert np.abs(got - want).max() < 2.0**-15 * np.abs(want).max()


def test_no_array_of_queries_times_keys():
    """The memory of a program at 16,384 tokens is that of its operands and results, forward and backward."""
    x = jax.ShapeDtypeStruct((1, 16_384, 4, 64), jnp.bfloat16)
    loss = jax.grad(lambda q, k, v: ops.attention(q, k, v, causal=True).astype(jnp.float32).sum(), (0, 1, 2))
    analysis = jax.jit(loss).lower(x, x, x).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 8 * 16_384 * 4 * 64 * 2
