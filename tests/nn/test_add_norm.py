"""The sum and its norm, in one pass."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import nn, ops

from . import naive


def normal(seed, *shape, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(naive.normal(seed, *shape, dtype=dtype))


def randomized(layer):
    return eqx.tree_at(lambda layer: layer.weight, layer, normal(3, *layer.shape, dtype=layer.weight.dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("implementation", ["auto", "reference", "python"])
@pytest.mark.parametrize("shape", [5, (2, 3)])
def test_is_the_two_steps(shape, implementation, dtype):
    layer = randomized(nn.FusedAddRMSNorm(shape, eps=0.1, dtype=dtype, implementation=implementation))
    x, residual = (normal(i, 4, *layer.shape, dtype=dtype) for i in (1, 2))
    norm, total = jax.vmap(layer)(x, residual)
    assert (norm.dtype, total.dtype) == (dtype, dtype)
    np.testing.assert_array_equal(total.astype(jnp.float32), (x + residual).astype(jnp.float32))
    theirs = eqx.nn.RMSNorm(layer.shape, eps=0.1, use_bias=False)
    theirs = eqx.tree_at(lambda layer: layer.weight, theirs, layer.weight.astype(jnp.float32))
    want = jax.vmap(theirs)(total.astype(jnp.float32))
    tolerance = {jnp.float32: 1e-6, jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-10}[dtype]
    np.testing.assert_allclose(norm.astype(jnp.float32), want, rtol=tolerance, atol=tolerance)


def test_without_weight():
    layer = nn.FusedAddRMSNorm(5, use_weight=False)
    assert layer.weight is None
    norm, _ = layer(normal(1, 5), normal(2, 5), key=None)
    np.testing.assert_allclose(jnp.mean(norm**2), 1, rtol=1e-4)


def test_large_and_no_values():
    """Norms of 1e18 are numbers; an empty batch has none."""
    for implementation in ("auto", "python"):
        layer = nn.FusedAddRMSNorm(3, implementation=implementation)
        norm, total = layer(jnp.array([1e18, -1e18, 0]), jnp.array([1e18, 0, 0]))
        np.testing.assert_allclose(total, [2e18, -1e18, 0])
        np.testing.assert_allclose(norm, np.sqrt(3 / 5) * np.array([2, -1, 0]), rtol=1e-6)
        empty = jax.vmap(layer)(jnp.zeros((0, 3)), jnp.zeros((0, 3)))
        assert [array.shape for array in empty] == [(0, 3), (0, 3)]


def test_gradients():
    layer, x, residual = randomized(nn.FusedAddRMSNorm(5)), normal(1, 4, 5), normal(2, 4, 5)

    def plain(weight, x, residual):
        total = x + residual
        scale = jax.lax.rsqrt(jnp.mean(total**2, -1, keepdims=True) + 1e-5)
        return jnp.sum(jnp.sin(total * scale * weight[None])) + jnp.sum(jnp.cos(total))

    def ours(weight, x, residual):
        norm, total = jax.vmap(eqx.tree_at(lambda layer: layer.weight, layer, weight))(x, residual)
        return jnp.sum(jnp.sin(norm)) + jnp.sum(jnp.cos(total))

    got, want = (jax.grad(f, (0, 1, 2))(layer.weight, x, residual) for f in (ours, plain))
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got, want)


def test_a_batch_is_one_call_in_place():
    """In a chain of blocks, the sum of each is written over that of the one before."""
    layer = nn.FusedAddRMSNorm(5, implementation="python")

    def blocks(x, residual):
        norm, total = jax.vmap(layer)(x, residual + 1)
        return jax.vmap(layer)(norm * 2, total)

    calls = eqxc.inspect(blocks, jnp.ones((4, 5)), jnp.ones((4, 5))).calls
    assert [(call.op, call.times) for call in calls] == [("add_rms_norm", 1)] * 2
    assert [call.operands for call in calls] == [("float32[4,5]", "float32[4,5]", "float32[5]")] * 2
    assert [alias.state for call in calls for alias in call.in_place] == ["in place"] * 2


def test_check():
    skip = ("threads", "sharded jit", "shard_map", "export", "odd shapes", "stateless", "determinism", "nested vmap")
    layer = randomized(nn.FusedAddRMSNorm(5, implementation="python"))
    assert eqxc.testing.check(layer, normal(1, 5), normal(2, 5), skip=skip).passed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: nn.FusedAddRMSNorm(3)(jnp.ones((2, 3)), jnp.ones((2, 3))),
            r"FusedAddRMSNorm: expected x and residual of the layer's shape, \(3,\); got \(2, 3\) and .*`jax\.vmap\(norm\)",
        ),
        (
            lambda: ops.add_rms_norm(jnp.ones(3), jnp.ones(4)),
            r"add_rms_norm: expected x and residual of one shape; got x: float32\[3\]",
        ),
        (
            lambda: ops.add_rms_norm(jnp.ones(3), jnp.ones(3, jnp.bfloat16)),
            r"add_rms_norm: expected x, residual of one floating dtype",
        ),
        (
            lambda: ops.add_rms_norm(jnp.ones(3), jnp.ones(3), jnp.ones(4)),
            r"add_rms_norm: expected weight of the shape of the last axis of x",
        ),
        (lambda: ops.add_rms_norm(jnp.float32(1), jnp.float32(1)), r"add_rms_norm: expected x with at least one axis"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
