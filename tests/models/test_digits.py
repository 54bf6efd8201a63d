"""The training program in models/digits.py."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import digits

from .. import one_device


def test_swish_is_right():
    x = jnp.linspace(-20.0, 20.0, 101)
    np.testing.assert_allclose(digits.swish(x), jax.nn.swish(x), rtol=1e-6, atol=1e-7)
    cotangent = jnp.cos(x)
    _, ours = jax.vjp(digits.swish, x)
    _, theirs = jax.vjp(jax.nn.swish, x)
    np.testing.assert_allclose(ours(cotangent)[0], theirs(cotangent)[0], rtol=1e-5, atol=1e-6)
    batched = jax.vmap(jax.grad(lambda row: digits.swish(row).sum()))(x[:100].reshape(10, 10))
    np.testing.assert_allclose(batched.ravel(), theirs(jnp.ones(101))[0][:100], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_reaches_its_accuracy(seed):
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        accuracy, _ = digits.train(seed=seed, progress=False)
    assert accuracy > 0.95


def test_the_program():
    result = subprocess.run(
        [sys.executable, "-m", "models.digits", "--epochs", "3"],
        cwd=pathlib.Path(__file__).parents[2],
        env=one_device.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "accuracy on 360 images that were not trained on: " in result.stdout
    assert "3/3" in result.stderr  # the progress bar
