"""`eqxcallback.testing.check`, the whole of it, on a real GPU."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc

from . import saxpy
from .conftest import require_gpu


pytestmark = pytest.mark.gpu

require_gpu()

import cupy  # noqa: E402


def ours(module, name):
    return getattr(importlib.import_module(f"eqxcallback.ops.{module}"), name)


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def test_an_op_of_ours():
    report = eqxc.testing.check(ours("_norm", "_rms_norm"), normal(3, 40), normal(40), eps=1e-5)
    assert report.passed, str(report)


def test_attention():
    q, k, v = normal(5, 4, 16), normal(7, 2, 16, seed=1), normal(7, 2, 16, seed=2)
    report = eqxc.testing.check(ours("_attention", "_attention"), q, (k, v), causal=True, scale=0.25)
    assert report.passed, str(report)


def test_an_op_of_a_user():
    report = eqxc.testing.check(saxpy.op(), jnp.arange(130.0), jnp.sin(jnp.arange(130.0)), a=3.0)
    assert report.passed, str(report)


class Scale(eqxc.Layer):
    """With CuPy, both ways."""

    weight: jax.Array
    vmap_method = "fold"

    command_buffer_compatible = True

    def kernel(self, ctx, out, x):
        weight: Any = self.weight  # here it is a Buffer
        with ctx:
            cupy.multiply(x.cupy(), weight.cupy(), out=out.cupy())

    def reference(self, x):
        return x * self.weight


def test_a_layer_in_cupy():
    report = eqxc.testing.check(Scale(normal(40)), normal(40, seed=1))
    assert report.passed, str(report)
