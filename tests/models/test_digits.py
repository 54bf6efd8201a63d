"""The training program in models/digits.py."""

import pathlib
import re
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
        accuracy, _ = digits.train(seed=seed)
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
    text = r"accuracy on 360 images that were not trained on: \d\d\.\d% \(3 epochs, \d+\.\d s\)\n"
    assert re.fullmatch(text, result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "expected --epochs of 1 or more; got 0"),
        (["--epochs", "many"], "argument --epochs: invalid int value: 'many'"),
        (["--seed", "-1"], "expected --seed from 0 to 2**32 - 1; got -1"),
        (["--sead", "1"], "unrecognized arguments: --sead 1"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert digits.main(arguments) == 2
    assert capsys.readouterr().err == f"digits: error: {message}\n"
