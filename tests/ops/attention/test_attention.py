"""Attention of any shape, with what is not finite, too large or too small, and what nobody sees."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from eqxcallback import ops

from .. import table
from ..special_values import fitting, replaced, same
from ..table import DTYPES, normal, row
from .cases import attention, decode_attention


pytestmark = pytest.mark.any_jax_version

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


sizes = strategies.integers(0, 40)
heads = strategies.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2), (6, 2)])
few = hypothesis.settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


@few
@hypothesis.given(
    sizes, strategies.integers(0, 300), heads, sizes, strategies.booleans(), strategies.sampled_from(DTYPES)
)
def test_attention_of_any_shape(isa, queries, keys, heads, size, causal, dtype):
    case, want = row(attention, (), queries, keys, *heads, size, causal, tags=()).wanted(dtype)
    case.check(case.op(*case.args), want)


def test_jax_agrees():
    """It is `jax.nn.dot_product_attention`."""
    q, k, v = normal(1, (2, 5, 4, 8)), normal(2, (2, 5, 2, 8)), normal(3, (2, 5, 2, 8))
    for causal in (True, False):
        got = ops.attention(q, k, v, causal=causal)
        with jax.numpy_rank_promotion("allow"):
            table.tolerate(got, np.asarray(jax.nn.dot_product_attention(q, k, v, is_causal=causal)), 13)


@by_dtype
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", [0, 1, 2])
@pytest.mark.parametrize("position", [0, 5, 16])
def test_not_finite_goes_through_attention(value, operand, position, dtype, isa):
    """The weight of a key that does not count may meet a value that is infinite: hence NaN for inf."""
    for case in (
        attention(dtype, (), 17, 17, 2, 1, 9, causal=False),
        decode_attention(dtype, (17,), 17, 2, 1, 9, lengths=17),
    ):
        index = (position, 0, 0) if operand == 0 or case.args[1].ndim == 3 else (slice(None), position, 0, 0)
        case = replaced(case, operand, index, value)
        same(case, case.op(*case.args), strict=False, rtol=max(table.ROUNDING[dtype], 2e-5), atol=1e-5)


@by_dtype
def test_what_is_masked_is_not_read(dtype, isa):
    """NaN beyond the diagonal, or beyond the length, is nobody's. (The reference multiplies it by zero.)"""
    case = attention(dtype, (), 70, 70, 2, 1, 9, causal=True)
    want = case.want()
    poisoned = replaced(replaced(case, 1, slice(65, None), np.nan), 2, slice(65, None), np.nan)
    got = np.asarray(case.op(*poisoned.args), np.float32)
    assert np.isnan(got[65:]).all()
    table.tolerate(got[:64].astype(dtype), want[:64], case.terms)

    case = decode_attention(dtype, (3,), 40, 2, 1, 9, lengths=[0, 17, 33])
    poisoned = case
    for example, length in enumerate([0, 17, 33]):
        for operand in (1, 2):
            poisoned = replaced(poisoned, operand, (example, slice(length, None)), np.nan)
    case.check(case.op(*poisoned.args))


@by_dtype
@pytest.mark.parametrize("size", [1e4, -1e4, 1e15])
def test_large_logits(size, dtype, isa):
    """The softmax of one that is far above the others is a choice: no overflow, and no zero."""
    for case in (attention(dtype, (), 5, 140, 2, 1, 8), decode_attention(dtype, (5,), 140, 2, 1, 8, lengths=140)):
        args = list(case.args)
        args[0] = np.full_like(args[0], fitting(size, dtype))
        args[1] = np.ones_like(args[1])
        args[1][..., 77, :, :] = 2 if size > 0 else 0.5
        chosen = np.broadcast_to(args[2][..., 77, :, :], args[0].shape)
        np.testing.assert_array_equal(case.op(*args), chosen)


@by_dtype
def test_all_logits_are_very_low(dtype, isa):
    """Their difference counts, not where they lie."""
    for case in (attention(dtype, (), 5, 20, 2, 1, 8), decode_attention(dtype, (5,), 20, 2, 1, 8, lengths=20)):
        args = [
            np.full_like(case.args[0], fitting(1e17, dtype)),
            np.full_like(case.args[1], fitting(-1e17, dtype)),
            *case.args[2:],
        ]
        want = np.broadcast_to(case.args[2].astype(np.float32).mean(axis=-3, keepdims=True), case.args[2].shape)
        got = np.asarray(case.op(*args), np.float32)
        np.testing.assert_allclose(
            got, np.broadcast_to(want[..., :1, :, :].squeeze(-3), got.shape), rtol=2.0**-8, atol=1e-6
        )


@pytest.mark.usefixtures("isa")
def test_an_infinite_value_of_the_last_key():
    q, k = jnp.ones((2, 8)), jnp.ones((5, 1, 8))
    v = jnp.ones((5, 1, 8)).at[4].set(jnp.inf)
    assert (ops.decode_attention(q, k, v, 5) == jnp.inf).all()
    assert (ops.decode_attention(q, k, v, 4) == 1).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("length", [np.uint32(2**32 - 1), np.int32(2**31 - 1), np.int16(30_000)])
def test_lengths_out_of_range_are_clamped(length):
    q, k = jax.random.normal(jax.random.key(0), (2, 8)), jax.random.normal(jax.random.key(1), (5, 1, 8))
    np.testing.assert_array_equal(ops.decode_attention(q, k, k, length), ops.decode_attention(q, k, k, 5))
