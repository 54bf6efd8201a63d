"""A layer with a forward kernel in Triton and a backward kernel in CUDA C++, in XLA's plan for a GPU."""

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc

from .programs import ONE, calls_of


pytest.importorskip("triton", reason="Triton is not installed")

from ..layer.many_sources import OfManySources


X = jnp.linspace(-3, 3, 45)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_both_kernels_are_captured(is_mapped):
    def loss(layer, x):
        return jnp.square(jax.vmap(layer)(x) if is_mapped else layer(x)).sum()

    gradients = jax.grad(loss, (0, 1))
    args = OfManySources(X + 4, 1.5), jnp.stack([X, 2 * X]) if is_mapped else X
    assert calls_of(gradients, *args, **ONE) == [True, True]
    report = eqxc.inspect(gradients, *args, platform="cuda")
    assert report.stage == "compiled"
    assert [launch.entry for call in report.calls for launch in call.launches] == ["swish", "gradients"]
