"""Shapes that peers take: masks of keys, slopes of each example, values of another size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from .. import table
from ..table import normal
from .options import exact, inputs


by_implementation = pytest.mark.parametrize("implementation", ["auto", "reference", "python"])


@pytest.mark.parametrize("v_size", [1, 4, 11])
@by_implementation
def test_values_may_have_another_size_than_keys(v_size, implementation):
    q, k, _ = inputs(5, 9, 4, 2, 6)
    v, upstream = normal(7, (9, 2, v_size)), normal(8, (5, 4, v_size))

    def attend(q, k, v, implementation=implementation):
        return ops.attention(q, k, v, causal=True, implementation=implementation)

    np.testing.assert_allclose(attend(q, k, v), exact(q, k, v, causal=True), rtol=1e-5, atol=1e-5)
    got = jax.vjp(attend, q, k, v)[1](upstream)
    want = jax.vjp(lambda *args: attend(*args, implementation="reference"), q, k, v)[1](upstream)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@by_implementation
def test_slopes_of_each_example(implementation):
    batch = [inputs(5, 9, 4, 2, 6), tuple(2 * x for x in inputs(5, 9, 4, 2, 6))]
    q, k, v = (jnp.stack(arrays) for arrays in zip(*batch, strict=True))
    slopes = np.abs(normal(2, (2, 4)))

    def attend(q, k, v, slopes, implementation=implementation):
        return ops.attention(q, k, v, alibi_slopes=slopes, implementation=implementation)

    want = [exact(*args, alibi_slopes=slope) for args, slope in zip(batch, slopes, strict=True)]
    np.testing.assert_allclose(attend(q, k, v, slopes), want, rtol=1e-5, atol=1e-5)

    def gradient(implementation):
        return jax.grad(lambda slopes: (attend(q, k, v, slopes, implementation) ** 2).sum())(slopes)

    np.testing.assert_allclose(gradient(implementation), gradient("reference"), rtol=1e-4, atol=1e-4)
    decoded = ops.decode_attention(q[:, -1], k, v, 9, alibi_slopes=slopes, implementation=implementation)
    np.testing.assert_allclose(decoded, attend(q, k, v, slopes)[:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 1, 1, 9), (1, 1, 9), (1, 9), (9,)], ids=str)
@by_implementation
def test_masks_of_keys(shape, implementation):
    """As padding is told to `jax.nn.dot_product_attention`, which wants four axes."""
    q, k, v = (jnp.stack([x, -x]) for x in inputs(5, 9, 4, 4, 6))
    mask = np.random.default_rng(1).random(shape) < 0.6
    mask[..., 0] = True
    got = ops.attention(q, k, v, mask=mask, implementation=implementation)
    four = mask.reshape(*[1] * (4 - mask.ndim), *shape)
    np.testing.assert_allclose(got, jax.nn.dot_product_attention(q, k, v, mask=four), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_a_mask_of_keys_is_no_array_of_queries_times_keys(implementation):
    q = k = v = jnp.zeros((2, 300, 1, 4))

    def attend(q, k, v, mask):
        return ops.attention(q, k, v, mask=mask, implementation=implementation)

    text = table.quickly_compiled(attend).lower(q, k, v, np.ones((2, 1, 1, 300), bool)).as_text()
    assert "300x300" not in text
    assert "300x300" in table.quickly_compiled(attend).lower(q, k, v, np.ones((2, 1, 300, 300), bool)).as_text()
