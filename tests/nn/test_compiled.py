"""Layers outside of any program."""

import cProfile
import pstats

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import nn

from .drop_ins import ONE_OF_EACH, randomized


NAMES = ("Linear", "LayerNorm", "RMSNorm", "GroupNorm", "GRUCell", "LSTMCell", "Embedding")
every_layer = pytest.mark.parametrize("case", [case for case in ONE_OF_EACH if case.name in NAMES], ids=str)


def arguments(case):
    return [jax.tree.map(lambda x: x[0], arg) for arg in case.inputs(jnp.float32, (2,))]


@every_layer
def test_outside_of_programs_and_without_them(case):
    layer, args = randomized(case.make()), arguments(case)
    want = layer(*args)
    with jax.disable_jit():
        steps = layer(*args)
    for got, expected in zip(jax.tree.leaves(want), jax.tree.leaves(steps), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@every_layer
def test_programs_have_its_steps_inlined(case):
    layer, args = randomized(case.make()), arguments(case)
    assert "op_call" in str(jax.make_jaxpr(lambda *args: layer(*args))(*args))
    # Of StableHLO: newer JAX keeps the call until it is lowered.
    assert "call @_" not in jax.jit(lambda *args: layer(*args)).lower(*args).as_text()


def test_a_call_takes_few_calls_of_python():
    """One dispatch: with one for each step these are more than 1000."""
    layer, x = nn.Linear(3, 2, key=jax.random.key(0)), jnp.arange(3.0)
    layer(x)
    with cProfile.Profile() as profile:
        layer(x)
    assert pstats.Stats(profile).total_calls < 300  # type: ignore[attr-defined]


def test_gradients_and_kernels_in_python():
    layer, x = nn.Linear(3, 2, key=jax.random.key(0)), jnp.arange(3.0)
    gradient = eqx.filter_grad(lambda layer: layer(x).sum())(layer)
    np.testing.assert_allclose(gradient.weight, jnp.stack([x, x]))
    assert nn.Linear(3, 2, key=jax.random.key(0), implementation="python")(x).shape == (2,)
