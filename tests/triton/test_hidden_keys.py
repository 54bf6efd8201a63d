"""Keys and values beyond `lengths` may be anything: nothing of them is in a result or in a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from ..ops.attention.options import NAMES, inputs, options
from ..ops.table import normal
from .derived import check_each, value_and_gradients


# It is about our kernel, which another Triton interprets alike.
pytestmark = pytest.mark.any_jax_version


QUERIES, KEYS, HEADS, FILLED = 21, 37, 4, 20


@pytest.mark.parametrize(
    ("name", "poison"),
    [*[(name, np.nan) for name in NAMES if "length" not in name], ("soft cap", np.inf), ("all", np.inf)],
)
def test_gradients(name, poison, request):
    """The derivative of a capped logit is NaN there, which a weight of zero does not hide."""
    chosen = options(QUERIES, KEYS, HEADS)[name] | {"lengths": np.int32(FILLED)}
    q, k, v = inputs(QUERIES, KEYS, HEADS, 2, 20)
    k[FILLED:], v[FILLED:] = 0, 0
    want = value_and_gradients((q, k, v), chosen)
    request.getfixturevalue("interpreted")
    k[FILLED:], v[FILLED:] = poison, -poison
    got = value_and_gradients((q, k, v), chosen)
    check_each(got, want)
    for gradient in got[1][1:3]:
        assert not np.any(gradient[FILLED:])


@pytest.mark.usefixtures("interpreted")
def test_examples_share_keys_and_have_their_lengths():
    """One example hides what another one sees: their gradients are added up."""
    q = normal(1, (3, QUERIES, HEADS, 20))
    _, k, v = inputs(QUERIES, KEYS, HEADS, 2, 20)
    k[30:], v[30:] = np.nan, np.nan
    lengths = np.asarray([30, 0, FILLED], np.int32)

    def summed(q, k, v):
        f = jax.vmap(lambda q, length: ops.attention(q, k, v, lengths=length, soft_cap=2.0))
        return (f(q, lengths) * normal(5, q.shape)).sum()

    def one_by_one(q, k, v):
        parts = [ops.attention(x, k[:n], v[:n], soft_cap=2.0) for x, n in zip(q, lengths, strict=True)]
        return (jnp.stack(parts) * normal(5, q.shape)).sum()

    got, want = (jax.grad(f, (0, 1, 2))(q, k, v) for f in (summed, one_by_one))
    check_each(got, want)
