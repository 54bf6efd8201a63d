"""Options at their limits: caps so high that they cap nothing, windows wider than all positions, masks of one element."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from ..table import normal
from .options import exact


pytestmark = pytest.mark.any_jax_version

Q, K, V = (normal(i, (40, 2, 16)) for i in range(3))
by_implementation = pytest.mark.parametrize("implementation", ["auto", "reference", "python"])


@by_implementation
@pytest.mark.parametrize("cap", [0.01, 1.0, 30.0, 1e3, 1e4, 1e6, 1e8, 1e20, 1e30, 3e38])
def test_caps_of_any_size(cap, implementation, isa):
    got = ops.attention(Q, K, V, soft_cap=cap, implementation=implementation)
    want = exact(Q, K, V, soft_cap=cap)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    one = ops.decode_attention(Q[-1], K, V, 40, soft_cap=cap, implementation=implementation)
    np.testing.assert_allclose(one, want[-1], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("cap", [30.0, 1e4, 1e8, 3e38])
def test_gradients_under_caps_of_any_size(cap, isa):
    def gradients(implementation):
        loss = lambda q, k, v: (ops.attention(q, k, v, soft_cap=cap, implementation=implementation) ** 2).sum()
        return jax.grad(loss, (0, 1, 2))(Q, K, V)

    for got, want in zip(gradients("auto"), gradients("reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@by_implementation
@pytest.mark.parametrize("side", [40, 2**29 - 1, 2**30 - 2, 2**30 - 1, 2**30, sys.maxsize])
def test_windows_that_reach_all_keys(side, implementation):
    attention = lambda **options: ops.attention(Q, K, V, implementation=implementation, **options)
    causal = exact(Q, K, V, causal=True)
    for window in (side, (side, 0)):
        np.testing.assert_allclose(attention(causal=True, window=window), causal, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(attention(window=(side, side)), exact(Q, K, V), rtol=1e-5, atol=2e-6)
    distance = np.broadcast_to(np.arange(40) - np.arange(40)[:, None], (2, 40, 40))  # for each head
    for window, seen in (((1, side), distance >= -1), ((side, 1), distance <= 1)):
        np.testing.assert_allclose(attention(window=window), exact(Q, K, V, mask=seen), rtol=1e-5, atol=2e-6)
    one = ops.decode_attention(Q[-1], K, V, 40, window=side, implementation=implementation)
    np.testing.assert_allclose(one, causal[-1], rtol=1e-5, atol=2e-6)


@by_implementation
@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize(
    "shape", [(), (1,), (1, 1), (1, 1, 1), (1, 1, 1, 1), (3, 1, 1, 1), (2, 1, 1), (40, 1), (1, 40)]
)
def test_masks_of_one_element(shape, seen, implementation):
    """A mask broadcasts as other arrays do: to all keys as well."""
    q, k, v = (jnp.stack([x] * 3) for x in (Q, K, V))
    mask = jnp.full(shape, seen)
    f = lambda q: ops.attention(q, k, v, mask=mask, implementation=implementation)
    want = np.stack([exact(Q, K, V)] * 3) if seen else np.zeros(q.shape)
    np.testing.assert_allclose(f(q), want, rtol=1e-5, atol=2e-6)
    if implementation != "python":
        gradient = jax.grad(lambda q: f(q).sum())(q)
        assert bool((gradient != 0).any()) is seen
    each = jax.vmap(lambda q, k, v, mask: ops.attention(q, k, v, mask=mask, implementation=implementation))
    if shape and shape[0] == 3:
        np.testing.assert_allclose(each(q, k, v, mask), want, rtol=1e-5, atol=2e-6)
