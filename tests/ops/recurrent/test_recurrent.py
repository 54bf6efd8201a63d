"""The gates of cells, against references, and formulas in f64."""

import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops
from eqxcallback.ops.recurrent import _reference as recurrent_reference

from .. import table
from ..formulas import f64, near
from ..table import BATCHES, DTYPES, normal


pytestmark = pytest.mark.any_jax_version


@pytest.mark.parametrize("shape", [(17,), (3, 1), (2, 3, 64), (0, 3), (101, 301)])
def test_gates(shape, isa):
    calls = []
    for dtype in DTYPES:
        *batch, size = shape
        gates, cell = normal(1, (*batch, 4 * size), dtype, 3.0), normal(2, shape, dtype)
        calls.append(table.Call(ops.lstm_gates, recurrent_reference.lstm_gates, (gates, cell), 10))
        inputs, states = (normal(seed, (*batch, 3 * size), dtype, 2.0) for seed in (3, 4))
        for bias in ((), (normal(5, (size,)),)):
            args = (inputs, states, cell, *bias)
            calls.append(table.Call(ops.gru_gates, recurrent_reference.gru_gates, args, 10))
    table.check_calls(calls)


def test_tanh_everywhere(isa):
    """The cell depends on the candidate alone."""
    x = np.concatenate([np.linspace(-12, 12, 24_001), [1e-30, -1e-3, 90, -90, 3e38, -3e38, np.nan]]).astype(np.float32)
    gates = np.stack([np.full_like(x, 100), np.full_like(x, -100), x, np.full_like(x, 100)], axis=-1)
    hidden, cell = ops.lstm_gates(jnp.asarray(gates), jnp.zeros((len(x), 1)))
    np.testing.assert_allclose(np.asarray(cell)[:, 0], np.tanh(x.astype(np.float64)), rtol=5e-7)
    np.testing.assert_allclose(np.asarray(hidden)[:, 0], np.tanh(np.tanh(x.astype(np.float64))), rtol=1e-6)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_lstm_gates(dtype, batch):
    gates, cell = normal(1, (*batch, 20), dtype, 3.0), normal(2, (*batch, 5), dtype)
    wide, c = f64(gates, cell)
    i, f, g, o = np.split(wide, 4, axis=-1)
    new = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    for got, want in zip(ops.lstm_gates(gates, cell), (sigmoid(o) * np.tanh(new), new), strict=True):
        near(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("bias", [None, jnp.float32, jnp.bfloat16])
def test_gru_gates(dtype, batch, bias):
    inputs, hiddens = (normal(seed, (*batch, 15), dtype, 3.0) for seed in (1, 2))
    hidden = normal(3, (*batch, 5), dtype)
    added = None if bias is None else normal(4, (5,), bias)
    of_inputs, of_hidden, h, b = f64(inputs, hiddens, hidden, 0 if added is None else added)
    (ir, iz, inew), (hr, hz, hn) = (np.split(gates, 3, axis=-1) for gates in (of_inputs, of_hidden))
    new = np.tanh(inew + sigmoid(ir + hr) * (hn + b))
    near(ops.gru_gates(inputs, hiddens, hidden, added), new + sigmoid(iz + hz) * (h - new), dtype)
