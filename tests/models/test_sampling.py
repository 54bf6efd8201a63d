"""The draw of the next token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from models.decoding.sampling import Sampling, adjusted, sample


LOGITS = jnp.log(jnp.asarray([0.5, 0.25, 0.15, 0.1], jnp.float32))


def draw(count=4000, logits=LOGITS, **options):
    keys = jax.random.split(jax.random.key(0), count)
    return np.asarray(jax.jit(jax.vmap(lambda key: sample(logits, key, Sampling(**options))))(keys))


def test_temperature_zero_takes_the_likeliest():
    assert set(draw(10)) == {0}


def test_draws_have_the_probabilities_of_the_logits():
    counts = np.bincount(draw(temperature=1.0), minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.5, 0.25, 0.15, 0.1], atol=0.03)


def test_temperature_sharpens():
    counts = np.bincount(draw(temperature=0.5), minlength=4) / 4000
    squares = np.square([0.5, 0.25, 0.15, 0.1])
    np.testing.assert_allclose(counts, squares / squares.sum(), atol=0.03)


@pytest.mark.parametrize(("top_p", "kept"), [(0.1, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.95, 4), (1.0, 4)])
def test_top_p(top_p, kept):
    assert set(draw(temperature=1.0, top_p=top_p)) == set(range(kept))


def test_what_is_left_keeps_its_proportions():
    counts = np.bincount(draw(temperature=1.0, top_k=2), minlength=4) / 4000
    np.testing.assert_allclose(counts, [2 / 3, 1 / 3, 0, 0], atol=0.03)


# top_p counts what top_k leaves: the first of two has 2/3 of them. min_p needs 0.3 of 0.5.
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2, "top_p": 0.6}, 1),
        ({"top_k": 2, "top_p": 0.7}, 2),
        ({"min_p": 0.29}, 3),
        ({"min_p": 0.31}, 2),
        ({"min_p": 1.0}, 1),
        ({"top_k": 1, "min_p": 0.1}, 1),
        ({"top_k": 9, "top_p": 0.76, "min_p": 0.4}, 2),
    ],
)
def test_options_together(options, kept):
    logits = adjusted(LOGITS, Sampling(temperature=1.0, **options))
    np.testing.assert_array_equal(np.isfinite(logits), np.arange(4) < kept)


def test_ties_are_in_together():
    logits = jnp.zeros(5, jnp.float32)
    for options in ({"top_p": 0.3}, {"top_k": 2}, {"min_p": 1.0}):
        assert set(draw(500, logits, temperature=1.0, **options)) == set(range(5))


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-50}, {"temperature": 1.0, "top_p": 1e-50}, {"temperature": 1.0, "top_k": 1}]
)
def test_extremes_take_the_likeliest(options):
    assert set(draw(50, **options)) == {0}


def defined(logits, sampling, seen):
    """`adjusted` by a sort, in NumPy."""
    logits = logits.astype(np.float64)
    divided = np.where(logits < 0, logits * sampling.repetition_penalty, logits / sampling.repetition_penalty)
    logits = np.where(seen, divided, logits)
    if sampling.temperature == 0:
        return logits
    logits = logits / sampling.temperature
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    descending = np.sort(probabilities)[::-1]
    kept = probabilities >= (descending[sampling.top_k - 1] if 0 < sampling.top_k < len(logits) else 0)
    within = np.sort(np.where(kept, probabilities, 0))[::-1]
    enough = np.flatnonzero(np.cumsum(within) >= sampling.top_p * within.sum() - 1e-12)
    kept &= probabilities >= within[enough[0]]
    kept &= probabilities >= sampling.min_p * descending[0]
    return np.where(kept, logits, -np.inf)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    steps=st.lists(st.integers(-40, 40), min_size=12, max_size=12),  # with ties
    seen=st.lists(st.booleans(), min_size=12, max_size=12),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 1, 3, 12, 50]),
    top_p=st.sampled_from([0.23, 0.81, 1.0]),
    min_p=st.sampled_from([0.0, 0.037, 0.43]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.5]),
)
def test_the_definition(steps, seen, **options):
    logits, seen = np.asarray(steps, np.float32) / 8, np.asarray(seen)
    sampling = Sampling(**options)
    ours = adjusted(jnp.asarray(logits), sampling, jnp.asarray(seen))
    np.testing.assert_allclose(ours, defined(logits, sampling, seen), rtol=1e-5)


def test_a_repetition_penalty_needs_what_was_there():
    with pytest.raises(ValueError, match="sample: expected the tokens seen before, for a repetition penalty; got none"):
        sample(LOGITS, jax.random.key(0), Sampling(repetition_penalty=1.2))


def test_a_penalty_changes_what_is_likeliest():
    seen = jnp.asarray([True, False, False, False])
    logits = jnp.asarray([2.0, 1.9, -1.0, -3.0], jnp.float32)
    key = jax.random.key(0)
    assert int(sample(logits, key, Sampling(repetition_penalty=1.0))) == 0
    assert int(sample(logits, key, Sampling(repetition_penalty=1.1), seen)) == 1
