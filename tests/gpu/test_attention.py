"""Attention, in Triton, on a real GPU: its tensor cores, all head sizes, edges, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops
from eqxcallback.ops.attention import _triton_tma
from eqxcallback.transform import architecture

from ..ops.attention import by_tma
from ..ops.attention.cases import attention
from ..ops.attention.options import exact_with_lse
from ..ops.families import tagged
from ..ops.table import normal, quickly_compiled, wide
from .conftest import require_gpu
from .values import BF16, DTYPES, F16, F32, close, kernels_in, on_device, tolerate_products


pytestmark = pytest.mark.gpu

require_gpu()


def identified(made):
    dtype, row = made
    return f"{dtype}-{row}"


def of_attention(tag):
    return [row for row in tagged(tag) if row.make is attention]


EDGES = [(dtype, row) for dtype in DTYPES for row in of_attention("edge")[:: 4 if dtype == F16 else 1]]
# Their arguments: (batch), queries, keys, heads, kv_heads, size, causal.
REAL = of_attention("model")
F16_SIZES = (64, 96)
LARGE = [
    *[(BF16, row) for row in REAL],
    *[(F16, row) for row in REAL if row.arguments[-2] in F16_SIZES],
    *[(F32, row) for row in REAL[::3]],
]
# Three kernels each, which take seconds to compile: not all that a forward kernel is tried with.
DIFFERENTIATED = [
    *[(BF16, row) for row in REAL if row.arguments[-1]],
    *[(BF16, row) for row in REAL if not row.arguments[-1] and row.arguments[-2] in (64, 128)],
    *[(F16, row) for row in REAL[:1]],
    *[(F32, row) for row in (REAL[0], REAL[6])],
]


def check(case, want):
    if all(x.size for x in case.args):
        assert kernels_in(case.op, *case.args) == 1
    got = np.asarray(jax.jit(case.op)(*case.args))
    assert got.dtype == case.args[0].dtype
    tolerate_products(got, want, case.terms)


@pytest.mark.parametrize("made", EDGES, ids=identified)
def test_edge_sizes(made):
    dtype, row = made
    case = row(dtype)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        want = np.asarray(quickly_compiled(case.reference)(*map(wide, case.args)))
    check(case, want)


@pytest.mark.parametrize("made", LARGE, ids=identified)
def test_sizes_of_models(made):
    dtype, row = made
    case = row(dtype)
    check(case, on_device(case.reference, *map(wide, case.args)))


@pytest.mark.parametrize("made", DIFFERENTIATED, ids=identified)
def test_gradients(made):
    dtype, row = made
    case = row(dtype)
    cotangent = normal(9, case.args[0].shape, dtype)

    def gradients(f):
        return lambda cotangent, *args: jax.vjp(f, *args)[1](cotangent)

    assert kernels_in(gradients(case.op), cotangent, *case.args) == 2
    got = jax.jit(gradients(case.op))(cotangent, *case.args)
    want = on_device(gradients(case.reference), wide(cotangent), *map(wide, case.args))
    for g, w in zip(got, want, strict=True):
        assert g.dtype == dtype
        tolerate_products(g, w, case.terms)


def test_large_logits_are_no_overflow():
    q, k, v = (normal(i, (1, 200, 2, 64), BF16, 30.0 if i < 3 else 1.0) for i in (1, 2, 3))
    got = np.asarray(jax.jit(lambda q, k, v: ops.attention(q, k, v, causal=True))(q, k, v), np.float32)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[:, 0], np.asarray(v, np.float32)[:, 0], rtol=2**-7)  # the first sees one key


def test_attention_under_vmap_and_scan():
    """Shared keys stay one; a scan runs the same kernel again."""
    q = normal(1, (3, 2, 130, 4, 64), BF16)
    k, v = (normal(i, (2, 130, 2, 64), BF16) for i in (2, 3))
    want = np.stack([np.asarray(jax.jit(ops.attention)(row, k, v), np.float32) for row in q])
    mapped = jax.jit(jax.vmap(ops.attention, (0, None, None)))(q, k, v)
    scanned = jax.jit(lambda q: jax.lax.scan(lambda _, row: (None, ops.attention(row, k, v)), None, q)[1])(q)
    close(mapped, want, rtol=2**-7, atol=2**-9)
    close(scanned, want, rtol=2**-7, atol=2**-9)


def test_f32_is_not_tf32():
    """Its products have f32's precision, also where tensor cores would round it to 10 bits."""
    case = attention(F32, (1,), 256, 256, 2, 2, 64)
    want = on_device(case.reference, *case.args)
    got = np.asarray(jax.jit(case.op)(*case.args))
    assert np.abs(got - want).max() < 2.0**-15 * np.abs(want).max()


def test_no_array_of_queries_times_keys():
    """The memory of a program at 16,384 tokens is that of its operands and results, forward and backward."""
    x = jax.ShapeDtypeStruct((1, 16_384, 4, 64), jnp.bfloat16)
    loss = jax.grad(lambda q, k, v: ops.attention(q, k, v, causal=True).astype(jnp.float32).sum(), (0, 1, 2))
    analysis = jax.jit(loss).lower(x, x, x).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 8 * 16_384 * 4 * 64 * 2


@pytest.fixture
def copied_by_tma(monkeypatch):
    """An error where another kernel would run."""
    if (arch := architecture(None)) not in _triton_tma.ARCHITECTURES:
        pytest.skip(f"{arch} has no such kernel")
    monkeypatch.setattr(by_tma.MODULE, "_attention", by_tma.OP)


@pytest.mark.usefixtures("copied_by_tma")
@pytest.mark.parametrize("name", by_tma.CALLS)
def test_by_tma(name):
    operands, options = by_tma.operands(name), by_tma.chosen(name)
    f = jax.jit(lambda *args: ops.attention_with_lse(*args, **options, implementation="triton"))
    error = 2e-5 if operands[0].dtype == F32 else 2**-7
    for got, want in zip(f(*operands), exact_with_lse(*operands, **options), strict=True):
        close(got, want, rtol=error, atol=error)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_many_tiles_by_tma(size, causal, request):
    """Copies run ahead of the products, around and around."""
    q, k, v = (normal(i, (2, 2000, heads, size), BF16) for i, heads in ((1, 4), (2, 2), (3, 2)))

    def attend(q, k, v):
        return ops.attention_with_lse(q, k, v, causal=causal, implementation="triton")

    wanted = jax.jit(attend)(q, k, v)
    request.getfixturevalue("copied_by_tma")
    for got, want in zip(jax.jit(lambda *args: attend(*args))(q, k, v), wanted, strict=True):
        close(got, np.asarray(want, np.float32), rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [64, 128])
def test_gradients_by_tma(size, causal, request):
    dout, q, k, v = (normal(i, (2, 2000, heads, size), BF16) for i, heads in ((4, 4), (1, 4), (2, 2), (3, 2)))

    def gradients(dout, *operands):
        def attend(*operands):
            return ops.attention(*operands, causal=causal, implementation="triton")

        return jax.vjp(attend, *operands)[1](dout)

    wanted = jax.jit(gradients)(dout, q, k, v)
    request.getfixturevalue("copied_by_tma")
    for got, want in zip(jax.jit(lambda *args: gradients(*args))(dout, q, k, v), wanted, strict=True):
        close(got, np.asarray(want, np.float32), rtol=2**-7, atol=2**-8)
