"""Feed-forward blocks with a gate."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import nn, ops

from . import naive


KEY = jax.random.key(0)
BLOCKS = [(nn.SwiGLU, {}, jax.nn.silu), *((nn.GEGLU, {"approximate": a}, a) for a in (True, False))]


def normal(seed, *shape, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(naive.normal(seed, *shape, dtype=dtype))


def formula(block, activation, x):
    """In f32, over a batch."""
    if isinstance(activation, bool):
        approximate = activation
        activation = lambda x: jax.nn.gelu(x, approximate=approximate)

    def linear(layer, x):
        y = x @ layer.weight.astype(jnp.float32).T
        return y if layer.bias is None else y + layer.bias.astype(jnp.float32)[None]

    x = x.astype(jnp.float32)
    return linear(block.down_proj, activation(linear(block.gate_proj, x)) * linear(block.up_proj, x))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize(("make", "options", "activation"), BLOCKS)
def test_blocks_are_the_formula(make, options, activation, use_bias, dtype):
    x = normal(1, 4, 5, dtype=dtype)
    for implementation in ("auto", "reference", "python"):
        block = make(5, 7, 3, use_bias=use_bias, **options, dtype=dtype, key=KEY, implementation=implementation)
        got = jax.vmap(block)(x)
        assert (got.dtype, got.shape) == (dtype, (4, 3))
        tolerance = {jnp.float32: 1e-6, jnp.bfloat16: 2.0**-6, jnp.float16: 2.0**-9}[dtype]
        np.testing.assert_allclose(
            got.astype(jnp.float32), formula(block, activation, x), rtol=tolerance, atol=tolerance
        )


def test_sizes():
    block = nn.SwiGLU(5, 7, key=KEY)
    assert (block.gate_proj.weight.shape, block.down_proj.weight.shape) == ((7, 5), (5, 7))
    assert (block.in_features, block.hidden_features, block.out_features) == (5, 7, 5)
    assert isinstance(block.up_proj, eqx.nn.Linear)
    assert not np.array_equal(block.up_proj.weight, block.gate_proj.weight)
    assert block(jnp.ones(5), key=KEY).shape == nn.GEGLU(5, 7, key=KEY)(jnp.ones(5), key=KEY).shape == (5,)


def test_a_batch_is_one_call():
    for make in (nn.SwiGLU, nn.GEGLU):
        block = make(5, 7, key=KEY, implementation="python")
        calls = eqxc.inspect(jax.vmap(block), jnp.ones((4, 5))).calls
        (call,) = [call for call in calls if call.lane == "python"]
        assert (call.times, call.operands) == (1, ("float32[4,7]", "float32[4,7]"))


def test_large_gates():
    """The gate is open, closed, or what the exact one is near 0."""
    gate = jnp.array([1e4, -1e4, 3e38, -3e38, 0.0, 1e-20])
    one = jnp.ones_like(gate)
    want = jnp.array([1e4, 0, 3e38, 0, 0, 5e-21])
    for implementation in ("auto", "python"):
        for out in (
            ops.swiglu(gate, one, implementation=implementation),
            ops.geglu(gate[:2], one[:2], implementation=implementation),
            ops.geglu(gate, one, approximate=False, implementation=implementation),
        ):
            np.testing.assert_allclose(out, want[: out.size], rtol=1e-6, atol=1e-30)


def test_gradients():
    """Against a plain formula, and against finite differences through `check`."""
    x = normal(1, 4, 5)
    for make, options, activation in BLOCKS:
        block = make(5, 7, **options, key=KEY)
        got, want = (
            eqx.filter_grad(lambda block: jnp.sin(f(block)).sum())(block)  # noqa: B023
            for f in (lambda block: jax.vmap(block)(x), lambda block: formula(block, activation, x))  # noqa: B023
        )
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nn.SwiGLU(5, 7, key=KEY)(jnp.ones((2, 5))), r"SwiGLU: expected x of shape \(5,\); got \(2, 5\)\."),
        (lambda: nn.GEGLU(5, 7, key=KEY)(jnp.ones(4)), r"GEGLU: expected x of shape \(5,\); got \(4,\)\. .*jax\.vmap"),
        (lambda: ops.geglu(jnp.ones(3)), r"geglu: expected an even last axis of gate"),
        (lambda: ops.geglu(jnp.ones(3), jnp.ones(4)), r"geglu: expected gate and up of one shape"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
