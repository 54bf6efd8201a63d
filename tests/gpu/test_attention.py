"""Attention, in Triton and by cuDNN, on a real GPU: its tensor cores, all head sizes, edges, and gradients."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops
from eqxcallback.transform import why_no_cudnn

from ..ops.attention import by_cudnn
from ..ops.attention.cases import attention
from ..ops.attention.segments import segments
from ..ops.families import tagged
from ..ops.table import normal, quickly_compiled, wide
from .conftest import require_gpu
from .values import BF16, DTYPES, F16, F32, close, kernels_in, on_device, tolerate_products


pytestmark = pytest.mark.gpu

require_gpu()


@pytest.fixture(autouse=True)
def of_any_size():
    """cuDNN takes calls of a few tokens too, which would be Triton's, as that is faster there."""
    with by_cudnn.of_any_size():
        yield


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


def without_cudnn():
    return by_cudnn.usable("a test of the kernel in Triton")


def anew(function):
    """Another function to JAX, which would run the program again in which another kernel was chosen."""
    return lambda *args: function(*args)


def calls_of_cudnn(function, *args):
    """The calls of cuDNN in a program."""
    return re.findall(r"custom_call @__cudnn\$(\w+)", jax.jit(anew(function)).lower(*args).as_text())


def check(case, want):
    """The kernel in Triton, and cuDNN where that is the default."""
    with without_cudnn():
        if all(x.size for x in case.args):
            assert kernels_in(anew(case.op), *case.args) == 1
        results = [jax.jit(anew(case.op))(*case.args)]
    if calls_of_cudnn(case.op, *case.args):
        results.append(jax.jit(anew(case.op))(*case.args))
    for got in map(np.asarray, results):
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

    with without_cudnn():
        assert kernels_in(gradients(case.op), cotangent, *case.args) == 2
        results = [jax.jit(gradients(case.op))(cotangent, *case.args)]
    if calls_of_cudnn(case.op, *case.args):
        assert kernels_in(gradients(case.op), cotangent, *case.args) == 1
        results.append(jax.jit(gradients(case.op))(cotangent, *case.args))
    want = on_device(gradients(case.reference), wide(cotangent), *map(wide, case.args))
    for got in results:
        for g, w in zip(got, want, strict=True):
            assert g.dtype == dtype
            tolerate_products(g, w, case.terms)


SEGMENTS = {name: ids for name, ids in segments(1024, 128).items() if not isinstance(ids, tuple)}


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 200}], ids=str)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", SEGMENTS)
def test_segments(name, size, options):
    """Long ones, of which some blocks see all of a range and are not asked about each pair."""
    q = normal(1, (2, 1024, 4, size), BF16)
    k, v = (normal(i, (2, 1024, 2, size), BF16) for i in (2, 3))
    cotangent = normal(9, q.shape, BF16)

    def results(cotangent, *args, **more):
        ids = np.broadcast_to(SEGMENTS[name], (2, 1024))
        out, backward = jax.vjp(lambda *args: ops.attention(*args, segment_ids=ids, **options, **more), *args)
        return out, *backward(cotangent)

    assert kernels_in(results, cotangent, q, k, v) == 2
    want = on_device(
        lambda *args: results(*args, implementation="reference"), wide(cotangent), wide(q), wide(k), wide(v)
    )
    for got, x in zip(jax.jit(results)(cotangent, q, k, v), want, strict=True):
        tolerate_products(got, x, 1024)


with_cudnn = pytest.mark.skipif(why_no_cudnn() is not None, reason=str(why_no_cudnn()))

# Batch, queries, keys, heads, heads of keys, size, dtype, and options.
BY_CUDNN: dict[str, tuple[Any, ...]] = {
    "causal": ((2,), 300, 300, 4, 4, 64, BF16, {"causal": True}),
    "f16": ((2,), 256, 256, 4, 2, 128, F16, {"causal": True}),
    "all keys": ((2, 3), 100, 333, 4, 2, 80, BF16, {"scale": 0.3}),
    "groups": ((), 1000, 1000, 16, 2, 128, BF16, {"causal": True}),
    "window": ((2,), 300, 300, 4, 2, 64, BF16, {"causal": True, "window": 77}),
    "window of one": ((1,), 130, 130, 2, 1, 64, F16, {"causal": True, "window": 1}),
    "window of all but one": ((1,), 130, 130, 2, 1, 64, BF16, {"causal": True, "window": 129}),
    "one key": ((), 33, 1, 2, 1, 8, BF16, {}),
}
by_case_of_cudnn = pytest.mark.parametrize("name", BY_CUDNN)


def of_cudnn(name):
    batch, queries, keys, heads, kv_heads, size, dtype, options = BY_CUDNN[name]
    q = normal(1, (*batch, queries, heads, size), dtype)
    return q, *(normal(i, (*batch, keys, kv_heads, size), dtype) for i in (2, 3)), options


@with_cudnn
@by_case_of_cudnn
def test_values_of_cudnn(name):
    """With the log-sum-exp, from which the gradients in Triton are made."""
    *args, options = of_cudnn(name)

    def attend(*args, **more):
        return ops.attention_with_lse(*args, **options, **more)

    assert calls_of_cudnn(attend, *args) == ["fmhaSoftmax"]
    assert kernels_in(attend, *args) == 0
    out, lse = jax.jit(attend)(*args)
    want, want_lse = on_device(lambda *args: attend(*args, implementation="reference"), *map(wide, args))
    tolerate_products(out, want, args[1].shape[-3])
    assert lse.dtype == F32
    close(lse, want_lse, rtol=1e-4, atol=1e-4)


@with_cudnn
@pytest.mark.parametrize("deterministic", [True, False])
@by_case_of_cudnn
def test_gradients_of_cudnn(name, deterministic):
    """By default those in Triton, from cuDNN's results."""
    *args, options = of_cudnn(name)
    cotangent = normal(9, args[0].shape, args[0].dtype)

    def gradients(cotangent, *args, **more):
        return jax.vjp(lambda *args: ops.attention(*args, **options, **more), *args)[1](cotangent)

    def got(cotangent, *args):
        return gradients(cotangent, *args, deterministic=deterministic)

    names = ["fmhaSoftmax"] if deterministic else ["fmhaSoftmax", "fmhaSoftmaxBackward"]
    assert calls_of_cudnn(got, cotangent, *args) == names
    assert kernels_in(got, cotangent, *args) == deterministic
    want = on_device(lambda *args: gradients(*args, implementation="reference"), wide(cotangent), *map(wide, args))
    once, again = (jax.jit(got)(cotangent, *args) for _ in range(2))
    for g, same, w in zip(once, again, want, strict=True):
        tolerate_products(g, w, args[1].shape[-3])
        if deterministic:
            np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(same, np.float32))


@with_cudnn
@pytest.mark.parametrize("deterministic", [True, False])
def test_cudnn_under_vmap(deterministic):
    """Keys that examples share are copied for cuDNN, and have one gradient."""
    q = normal(1, (3, 2, 130, 4, 64), BF16)
    k, v = (normal(i, (2, 130, 2, 64), BF16) for i in (2, 3))

    def gradients(q, k, v, **more):
        def loss(q, k, v):
            out = jax.vmap(lambda q: ops.attention(q, k, v, causal=True, **more))(q)
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    def by_default(*args):
        return gradients(*args, deterministic=deterministic)

    assert "fmhaSoftmax" in calls_of_cudnn(by_default, q, k, v)
    value, got = jax.jit(by_default)(q, k, v)
    wanted, want = on_device(lambda *args: gradients(*args, implementation="reference"), *map(wide, (q, k, v)))
    np.testing.assert_allclose(value, wanted, rtol=2**-7, atol=1.0)
    for g, w in zip(got, want, strict=True):
        close(g, w, rtol=2**-5, atol=2**-6)


@with_cudnn
def test_a_negative_scale_is_not_for_cudnn():
    q, k, v = (normal(i, (2, 200, heads, 64), BF16, 4.0) for i, heads in ((1, 4), (2, 2), (3, 2)))
    attend = lambda q, k, v, **more: ops.attention(q, k, v, causal=True, scale=-0.5, **more)
    assert calls_of_cudnn(attend, q, k, v) == []
    want = on_device(lambda *args: attend(*args, implementation="reference"), *map(wide, (q, k, v)))
    tolerate_products(jax.jit(attend)(q, k, v), want, 200)


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
