"""GRUCell and LSTMCell: what tests/nn/test_drop_ins.py does not say of all layers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from eqxcallback import nn


QUICK = {"xla_backend_optimization_level": 0}
KEY = jax.random.key(0)


def normal(*shape, dtype: DTypeLike = np.float32):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape).astype(dtype))


def states(name, *batch, dtype=np.float32):
    hidden = normal(*batch, 5, dtype=dtype)
    return (hidden, normal(*batch, 5, dtype=dtype)[..., ::-1]) if name == "LSTMCell" else hidden


def step(cell):
    def one(state, x):
        new = cell(x, state)
        return new, jax.tree.leaves(new)[0]

    return one


@pytest.mark.parametrize("name", ["GRUCell", "LSTMCell"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_a_sequence_and_its_gradient(name, use_bias):
    x, state = normal(9, 3), states(name)

    def loss(cell):
        final, outputs = jax.lax.scan(step(cell), state, x)
        return jnp.sum(jnp.sin(outputs)) + sum(map(jnp.sum, jax.tree.leaves(final)))

    cells = [getattr(module, name)(3, 5, use_bias, key=KEY) for module in (nn, eqx.nn)]
    ours, theirs = (jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(cell) for cell in cells)
    for got, want in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["GRUCell", "LSTMCell"])
def test_a_batch_is_two_products(name):
    cell = getattr(nn, name)(3, 5, key=KEY)
    text = jax.jit(jax.vmap(cell)).lower(normal(7, 3), states(name, 7)).as_text()
    assert text.count("stablehlo.dot_general") == 2
    assert not [word for word in ("transpose", "while") if f"stablehlo.{word}" in text]


@pytest.mark.parametrize("name", ["GRUCell", "LSTMCell"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits_err_less_than_equinox_does(name, dtype):
    """Many steps, against the same weights in f32."""
    x, state = normal(40, 3, dtype=dtype), states(name, dtype=dtype)
    ours, theirs = (getattr(module, name)(3, 5, dtype=dtype, key=KEY) for module in (nn, eqx.nn))
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (theirs, x, state))

    def run(cell, x, state):
        return np.asarray(jax.lax.scan(step(cell), state, x)[1], np.float32)

    want = run(wide[0], wide[1], wide[2])
    errors = [np.sqrt(np.mean((run(cell, x, state) - want) ** 2)) for cell in (ours, theirs)]
    assert errors[0] <= errors[1] * 1.05
    assert errors[0] < 16 * float(jnp.finfo(dtype).eps)


def test_saturated_gates():
    """Infinite sums of products are gates that are open or closed, as in Equinox."""
    for name in ("GRUCell", "LSTMCell"):
        ours, theirs = (getattr(module, name)(3, 5, key=KEY) for module in (nn, eqx.nn))
        x, state = 1e30 * normal(3), states(name)
        for got, want in zip(*(jax.tree.leaves(cell(x, state)) for cell in (ours, theirs)), strict=True):
            assert np.all(np.isfinite(got))
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_the_cell_state_may_be_wider():
    with jax.numpy_dtype_promotion("standard"):
        h, c = normal(5, dtype=jnp.bfloat16), normal(5)
        outs = [
            module.LSTMCell(3, 5, dtype=jnp.bfloat16, key=KEY)(normal(3, dtype=jnp.bfloat16), (h, c))
            for module in (nn, eqx.nn)
        ]
    for got, want in zip(*outs, strict=True):
        assert got.dtype == want.dtype == jnp.float32
        np.testing.assert_allclose(got, want, atol=0.02)
