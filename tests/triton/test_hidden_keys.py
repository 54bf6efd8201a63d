"""Keys and values beyond `lengths` may be anything: nothing of them is in a result or in a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from ..ops.attention.options import NAMES, inputs, options
from ..ops.table import normal


QUERIES, KEYS, HEADS, FILLED = 21, 37, 4, 20


def gradients(operands, chosen, lengths):
    """Of the value and its log-sum-exp, by all operands that have one."""
    numbers = {name: x for name, x in chosen.items() if name in ("bias", "alibi_slopes")}
    others = {name: x for name, x in chosen.items() if name not in numbers}

    def weighed(q, k, v, numbers):
        out, lse = ops.attention_with_lse(q, k, v, **numbers, **others, lengths=lengths)
        seen = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return (out * normal(9, out.shape)).sum() + (seen * normal(10, lse.shape)).sum(), out

    return jax.value_and_grad(weighed, argnums=(0, 1, 2, 3), has_aux=True)(*operands, numbers)


def check(got, want):
    error = 2e-5 if got.dtype == np.float32 else 2**-7
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=error, atol=error)


@pytest.mark.parametrize(
    ("name", "poison"),
    [*[(name, np.nan) for name in NAMES if "length" not in name], ("soft cap", np.inf), ("all", np.inf)],
)
def test_gradients(name, poison, request):
    """The derivative of a capped logit is NaN there, which a weight of zero does not hide."""
    chosen = {name: x for name, x in options(QUERIES, KEYS, HEADS)[name].items() if name != "lengths"}
    q, k, v = inputs(QUERIES, KEYS, HEADS, 2, 20)
    k[FILLED:], v[FILLED:] = 0, 0
    want = gradients((q, k, v), chosen, np.int32(FILLED))
    request.getfixturevalue("interpreted")
    k[FILLED:], v[FILLED:] = poison, -poison
    got = gradients((q, k, v), chosen, np.int32(FILLED))
    jax.tree.map(check, got, want)
    for gradient in got[1][1:3]:
        assert not np.any(gradient[FILLED:])


@pytest.mark.usefixtures("interpreted")
def test_examples_share_keys_and_have_their_lengths():
    """What one example hides, another one sees: their gradients are added up."""
    q = normal(1, (3, QUERIES, HEADS, 20))
    _, k, v = inputs(QUERIES, KEYS, HEADS, 2, 20)
    k[30:], v[30:] = np.nan, np.nan
    lengths = np.asarray([30, 0, FILLED], np.int32)

    def summed(q, k, v):
        f = jax.vmap(lambda q, length: ops.attention(q, k, v, lengths=length, soft_cap=2.0))
        return (f(q, lengths) * normal(5, q.shape)).sum()

    def one_by_one(q, k, v):
        found = [ops.attention(x, k[:n], v[:n], soft_cap=2.0) for x, n in zip(q, lengths, strict=True)]
        return (jnp.stack(found) * normal(5, q.shape)).sum()

    got, want = (jax.grad(f, (0, 1, 2))(q, k, v) for f in (summed, one_by_one))
    jax.tree.map(check, got, want)
