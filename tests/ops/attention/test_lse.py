"""The log-sum-exp of attention: its values, its derivatives, and what it is for, attention in parts."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import ops

from .. import table
from ..table import normal
from . import options


pytestmark = pytest.mark.any_jax_version

SHAPE = (70, 150, 4, 2, 17)
NAMES = ["causal window", "no length", "offset before the keys", "bias with -inf", "causal dropout", "all"]
by_implementation = pytest.mark.parametrize("implementation", ["native", "python", "reference"])


@by_implementation
@pytest.mark.parametrize("name", ["plain", *NAMES])
def test_values(name, implementation):
    args, given = options.inputs(*SHAPE), {"plain": {}, **options.options(*SHAPE[:3])}[name]
    f = table.quickly_compiled(lambda *args: ops.attention_with_lse(*args, **given, implementation=implementation))
    out, lse = f(*args)
    want, want_lse = options.exact_with_lse(*args, **given)
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", table.DTYPES, ids=str)
def test_the_kernel(dtype, isa):
    """The same result as without, bit by bit, and the other in f32 whatever the dtype is."""
    for queries, keys in ((1, 7), (33, 40), (150, 300)):
        args = options.inputs(queries, keys, 4, 2, 17, dtype)
        out, lse = ops.attention_with_lse(*args, causal=True)
        np.testing.assert_array_equal(out, ops.attention(*args, causal=True))
        np.testing.assert_allclose(lse, options.exact_with_lse(*args, causal=True)[1], rtol=2e-6, atol=4e-6)


def losses(args, given, implementation):
    weights = normal(8, args[0].shape), normal(9, args[0].shape[:2])

    def loss(*args):
        results = ops.attention_with_lse(*args, **given, implementation=implementation)
        seen = jnp.isfinite(results[1])
        results = (results[0].astype(jnp.float32), jnp.where(seen, results[1], 0.0))
        return sum(jnp.vdot(w, r) for w, r in zip(weights, results, strict=True))

    return loss


@functools.cache
def defined(name):
    """Operands, one program of gradients for all instruction sets, and those of the reference."""
    args, given = options.inputs(*SHAPE), {"plain": {}, **options.options(*SHAPE[:3])}[name]
    f, reference = (
        table.quickly_compiled(jax.grad(losses(args, given, kind), (0, 1, 2))) for kind in ("auto", "reference")
    )
    return args, f, reference(*args)


@pytest.mark.parametrize("name", ["plain", *NAMES])
def test_gradients(name, isa):
    args, f, want = defined(name)
    for g, w in zip(f(*args), want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", table.DTYPES[1:], ids=str)
def test_gradients_of_sixteen_bits(dtype):
    args = options.inputs(70, 90, 2, 1, 32, dtype)
    loss = losses(args, {"causal": True}, "native")
    got = table.quickly_compiled(jax.grad(loss, (0, 1, 2)))(*args)
    wide = [jnp.asarray(x, jnp.float32) for x in args]
    want = table.quickly_compiled(jax.grad(losses(wide, {"causal": True}, "reference"), (0, 1, 2)))(*wide)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(g, np.float32), w, rtol=table.ROUNDING[dtype] * 4, atol=4e-3)


def test_against_finite_differences():
    args = options.inputs(5, 9, 4, 2, 6)
    loss = losses(args, {"causal": True}, "native")
    gradients = jax.grad(loss, (0, 1, 2))(*args)
    for i, arg in enumerate(args):
        direction = normal(5 + i, arg.shape)
        ends = [loss(*(x + step * direction if j == i else x for j, x in enumerate(args))) for step in (1e-2, -1e-2)]
        np.testing.assert_allclose((gradients[i] * direction).sum(), (ends[0] - ends[1]) / 2e-2, rtol=5e-3)


def in_parts(q, k, v, cuts, **given):
    """Each part at its own positions."""
    begins, ends = (0, *cuts), (*cuts, k.shape[0])
    parts = [
        ops.attention_with_lse(q, k[a:b], v[a:b], offset=k.shape[0] - q.shape[0] - a, **given)
        for a, b in zip(begins, ends, strict=True)
    ]
    out, lse = (jnp.stack(arrays) for arrays in zip(*parts, strict=True))
    return (jax.nn.softmax(lse, axis=0)[..., None] * out).sum(axis=0)


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_parts_are_the_whole(implementation):
    """Also where a part has no key for a query, and in the derivatives."""
    args, given = options.inputs(40, 60, 4, 2, 8), {"causal": True, "implementation": implementation}
    whole, parts = (lambda *args: ops.attention(*args, **given)), (lambda q, k, v: in_parts(q, k, v, (20, 45), **given))
    np.testing.assert_allclose(parts(*args), whole(*args), rtol=1e-5, atol=1e-6)
    got, want = (
        jax.jit(jax.grad(lambda *args, f=f: jnp.sin(f(*args)).sum(), (0, 1, 2)))(*args) for f in (parts, whole)
    )
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


def test_no_key_at_all():
    q, kv = normal(0, (3, 2, 4)), jnp.zeros((0, 2, 4))
    for implementation in ("native", "python", "reference"):
        out, lse = ops.attention_with_lse(q, kv, kv, implementation=implementation)
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(lse, -np.inf)


def test_transformations():
    batch: list[Any] = [np.stack([x, 2 * x]) for x in options.inputs(6, 9, 4, 2, 8)]
    f = functools.partial(ops.attention_with_lse, causal=True)
    mapped = jax.vmap(f)(*batch)
    (call,) = eqxc.inspect(jax.vmap(f), *batch).calls
    assert call.times == 1
    for i in range(2):
        for got, want in zip(mapped, f(*(x[i] for x in batch)), strict=True):
            np.testing.assert_allclose(got[i], want, rtol=1e-6, atol=1e-6)
    _, tangents = jax.jvp(f, tuple(x[0] for x in batch), tuple(x[1] for x in batch))
    want = eqx.filter_jvp(
        functools.partial(f, implementation="reference"), [x[0] for x in batch], [x[1] for x in batch]
    )[1]
    for got, wanted in zip(tangents, want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_values_of_another_size():
    q, k, v = normal(0, (5, 2, 8)), normal(1, (7, 2, 8)), normal(2, (7, 2, 12))
    out, lse = ops.attention_with_lse(q, k, v)
    assert out.shape == (5, 2, 12)
    np.testing.assert_allclose(lse, options.exact_with_lse(q, k, v)[1], rtol=1e-6)


def test_an_unknown_option():
    args = options.inputs(2, 2, 1, 1, 4)
    with pytest.raises(TypeError, match=r"attention_with_lse: expected options of attention; got 'is_causal'\."):
        ops.attention_with_lse(*args, is_causal=True)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ValueError, match=r"attention_with_lse: expected q and k of the same"):
        ops.attention_with_lse(args[0], args[1][..., :2], args[2][..., :2])
