"""Tests of the reference of a rotation itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from ..table import normal


pytestmark = pytest.mark.any_jax_version


def test_a_rotation_is_one_of_complex_numbers():
    x, positions = normal(1, (7, 3, 10)), np.arange(7) * 5
    angles = positions[:, None, None] * 100.0 ** (-np.arange(5) / 5)
    rotated = (x[..., :5] + 1j * x[..., 5:]) * np.exp(1j * angles)
    got = ops.rotary_embedding(x, *ops.rotary_table(jnp.asarray(positions), 10, theta=100.0))
    np.testing.assert_allclose(got, np.concatenate([rotated.real, rotated.imag], -1), atol=2e-5)


def test_factors_divide_the_angles():
    factors = [1.0, 2.5, 8.0]
    angles = np.arange(7)[:, None] * 100.0 ** (-np.arange(3) / 3) / factors
    cos, sin = ops.rotary_table(jnp.arange(7), 6, theta=100.0, factors=factors)
    np.testing.assert_allclose(np.asarray(cos) + 1j * np.asarray(sin), np.exp(1j * angles), atol=2e-6)


def test_the_gradient_keeps_no_operand():
    """The gradient of `x` needs the table alone: a program has one array for each step of a chain, which `tanh` keeps."""
    table = ops.rotary_table(jnp.arange(64), 64)

    def chain(x):
        for _ in range(4):
            x = jnp.tanh(ops.rotary_embedding(2 * x, *table))
        return x.sum()

    x = jnp.ones((64, 12, 64))
    memory: Any = jax.jit(jax.grad(chain)).lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 5.5 * x.nbytes
