"""Attention in f32 of numbers of any magnitude, of heads and queries that a table may multiply in terms of bf16.

It does so only where no term overflows or counts as zero.
"""

import jax
import numpy as np
import pytest

from eqxcallback import ops

from ..table import normal
from .options import exact


pytestmark = pytest.mark.usefixtures("isa")

QUERIES, KEYS, HEADS, KV_HEADS = 150, 300, 4, 2  # more than two blocks of each, the last ones not whole


def operands(size):
    return (
        normal(1, (QUERIES, HEADS, size)),
        normal(2, (KEYS, KV_HEADS, size)),
        normal(3, (KEYS, KV_HEADS, size)),
    )


def check(q, k, v, got, **options):
    """Sums in f32 are no further from sums in f64."""
    want = exact(q, k, v, **options)
    highest = np.abs(want).max()
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= 4e-6 * highest
    assert np.sqrt(np.mean((got - want) ** 2)) <= 4e-7 * highest


@pytest.mark.parametrize("size", [32, 64, 96])
@pytest.mark.parametrize("causal", [False, True])
def test_usual_numbers(size, causal):
    q, k, v = operands(size)
    check(q, k, v, np.asarray(ops.attention(q, k, v, causal=causal)), causal=causal)


@pytest.mark.parametrize("of_keys", [2.0**-100, 2.0**-85, 2.0**-40, 2.0**49, 2.0**60, 2.0**100])
def test_keys_and_queries(of_keys):
    """One times the other is as usual."""
    q, k, v = operands(64)
    q, k = q / np.float32(of_keys), k * np.float32(of_keys)
    check(q, k, v, np.asarray(ops.attention(q, k, v)))


@pytest.mark.parametrize("of_values", [2.0**-100, 2.0**-85, 2.0**-40, 2.0**49, 2.0**60, 2.0**100])
def test_values(of_values):
    q, k, v = operands(64)
    v = v * np.float32(of_values)
    check(q, k, v, np.asarray(ops.attention(q, k, v)))


def test_each_block_of_keys_by_itself():
    """Blocks of both kinds meet in one result."""
    q, k, v = operands(32)
    k[128:256] *= np.float32(2.0**-100)
    v[:128] *= np.float32(2.0**70)
    check(q, k, v, np.asarray(ops.attention(q, k, v)))


def test_numbers_of_one_block_differ():
    """Features far below the highest number of a block are as exact as others."""
    q, k, v = operands(32)
    v[..., 16:] *= np.float32(2.0**-70)
    got = np.asarray(ops.attention(q, k, v))
    check(q, k, v[..., :16], got[..., :16])
    check(q, k, v[..., 16:], got[..., 16:])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", [0, 2])
def test_a_query_or_a_value_that_is_not_finite(operand, value):
    """The query spoils its own result, and each query has some of the value, in this feature."""
    given = operands(32)
    want = np.asarray(ops.attention(*given)).copy()
    given[operand][140, 0, 7] = value
    if operand == 0:
        want[140, 0] = np.nan
    else:
        want[:, :2, 7] = value
    np.testing.assert_allclose(ops.attention(*given), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_key_that_is_not_finite(value):
    """A query whose logit is -inf leaves the key out."""
    q, k, v = operands(32)
    want = np.asarray(ops.attention(q, np.delete(k, 140, 0), np.delete(v, 140, 0))).copy()
    want[:, 2:] = np.asarray(ops.attention(q, k, v))[:, 2:]
    k[140, 0, 7] = value
    got = np.asarray(ops.attention(q, k, v))
    want[:, :2][~(q[:, :2, 7] * value < 0)] = np.nan
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_gradients_of_a_call_by_terms():
    """They are computed without: of the very result that they are gradients of."""
    q, k, v = operands(64)
    weights = normal(4, (QUERIES, HEADS, 64))
    step = np.float32(2.0**-7)
    for i, x in enumerate((q, k, v)):
        direction = normal(5 + i, x.shape)

        def loss(t, i=i, direction=direction):
            moved = [y + t * direction if j == i else y for j, y in enumerate((q, k, v))]
            return (ops.attention(*moved) * weights).sum()

        slope = (loss(step) - loss(-step)) / (2 * step)
        np.testing.assert_allclose(jax.grad(loss)(np.float32(0)), slope, rtol=0.02, atol=0.05)
