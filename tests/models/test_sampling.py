"""The draw of the next token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sampling import sample


LOGITS = jnp.log(jnp.asarray([0.5, 0.25, 0.15, 0.1], jnp.float32))


def draw(count=4000, **options):
    keys = jax.random.split(jax.random.key(0), count)
    return np.asarray(jax.jit(jax.vmap(lambda key: sample(LOGITS, key, **options)))(keys))


def test_temperature_zero_takes_the_likeliest():
    assert set(draw(10, temperature=0.0, top_p=1.0)) == {0}


def test_draws_have_the_probabilities_of_the_logits():
    counts = np.bincount(draw(temperature=1.0, top_p=1.0), minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.5, 0.25, 0.15, 0.1], atol=0.03)


def test_temperature_sharpens():
    counts = np.bincount(draw(temperature=0.5, top_p=1.0), minlength=4) / 4000
    squares = np.square([0.5, 0.25, 0.15, 0.1])
    np.testing.assert_allclose(counts, squares / squares.sum(), atol=0.03)


@pytest.mark.parametrize(("top_p", "kept"), [(0.1, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.95, 4), (1.0, 4)])
def test_top_p(top_p, kept):
    assert set(draw(temperature=1.0, top_p=top_p)) == set(range(kept))


def test_ties_are_in_together():
    logits = jnp.zeros(5, jnp.float32)
    keys = jax.random.split(jax.random.key(0), 500)
    drawn = jax.vmap(lambda key: sample(logits, key, temperature=1.0, top_p=0.3))(keys)
    assert set(np.asarray(drawn)) == set(range(5))


@pytest.mark.parametrize("options", [{"temperature": 1e-50, "top_p": 1.0}, {"temperature": 1.0, "top_p": 1e-50}])
def test_extremes_take_the_likeliest(options):
    assert set(draw(50, **options)) == {0}
