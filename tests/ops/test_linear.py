"""Products, tables, and the gates of cells, against their formulas in f64, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from .cases import normal


BATCHES = [(), (3,), (2, 3)]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def f64(*arrays):
    return [np.asarray(x, np.float64) for x in arrays]


def near(got, want, dtype):
    """Rounded once from f32, which has summed a few terms."""
    assert got.dtype == dtype
    tolerance = 4e-6 if dtype == jnp.float32 else float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("bias", [None, jnp.float32, jnp.bfloat16])
def test_linear(dtype, batch, bias):
    x, weight = normal(1, (*batch, 7), dtype), normal(2, (5, 7), dtype)
    added = None if bias is None else normal(3, (5,), bias)
    wide, matrix, vector = f64(x, weight, 0 if added is None else added)
    near(ops.linear(x, weight, added), wide @ matrix.T + vector, dtype)


@pytest.mark.parametrize(("batch", "size", "out"), [((), 0, 3), ((2,), 3, 0), ((0,), 3, 2), ((), 0, 0)])
def test_linear_without_elements(batch, size, out):
    got = ops.linear(jnp.ones((*batch, size)), jnp.ones((out, size)), jnp.ones(out))
    np.testing.assert_array_equal(got, np.full((*batch, out), size + 1.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_derivatives_of_linear(dtype):
    """Of first and second order, of any of the operands."""
    x, weight, bias = normal(1, (3, 7), dtype), normal(2, (5, 7), dtype), normal(3, (5,))

    def loss(product):
        return lambda *args: jnp.sum(jnp.sin(product(*args).astype(jnp.float32)))

    def plain(x, weight, bias):
        wide = jnp.matmul(x.astype(jnp.float32), weight.astype(jnp.float32).T)
        return (wide + jnp.broadcast_to(bias, wide.shape)).astype(x.dtype)

    def derivatives(product):
        gradient = jax.grad(loss(product), (0, 1, 2))
        tangents = tuple(jnp.ones_like(jnp.asarray(each)) for each in (x, weight, bias))
        return gradient(x, weight, bias), jax.jvp(gradient, (x, weight, bias), tangents)[1]

    got, want = jax.jit(lambda: [derivatives(product) for product in (ops.linear, plain)])()
    tolerance = 1e-5 if dtype == jnp.float32 else 8 * float(jnp.finfo(dtype).eps)
    for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert g.dtype == w.dtype
        g, w = f64(g, w)
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * np.max(np.abs(w)))


@pytest.mark.parametrize("index", [0, [[3, -1], [-4, 2]], [], [7, -9, 2**31 - 1]], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.complex64])
def test_embedding(index, dtype):
    table = jnp.asarray(np.arange(12).reshape(4, 3), dtype)
    index = jnp.asarray(index, jnp.int32)
    got = ops.embedding(index, table)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, table[index])


@pytest.mark.parametrize("dtype", DTYPES)
def test_derivatives_of_embedding(dtype):
    table, tangent = normal(1, (4, 3), dtype), normal(2, (4, 3), dtype)
    index = jnp.array([1, 3, 1, -3, 9])
    out, out_dot = jax.jvp(lambda table: ops.embedding(index, table), (table,), (tangent,))
    np.testing.assert_array_equal(out, table[np.array([1, 3, 1, 1, 3])])
    np.testing.assert_array_equal(out_dot, tangent[np.array([1, 3, 1, 1, 3])])
    gradient = jax.grad(lambda table: ops.embedding(index, table).astype(jnp.float32).sum())(table)
    # As in `jax.numpy`, the index that is out of range gives no gradient.
    np.testing.assert_array_equal(gradient.astype(jnp.float32), np.array([0, 3, 0, 1])[:, None] * np.ones(3))


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
    own, other, h, b = f64(inputs, hiddens, hidden, 0 if added is None else added)
    (ir, iz, inew), (hr, hz, hn) = (np.split(each, 3, axis=-1) for each in (own, other))
    new = np.tanh(inew + sigmoid(ir + hr) * (hn + b))
    near(ops.gru_gates(inputs, hiddens, hidden, added), new + sigmoid(iz + hz) * (h - new), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("parameters", [(), ("weight",), ("bias",), ("weight", "bias")])
def test_group_norm(dtype, batch, parameters):
    x = normal(1, (*batch, 6, 7), dtype)
    given = {name: normal(seed, (6,)) for seed, name in enumerate(parameters)}
    (wide,) = f64(x)
    parts = wide.reshape(*batch, 3, 14)
    parts = parts - parts.mean(-1, keepdims=True)
    want = (parts / np.sqrt(np.mean(parts**2, axis=-1, keepdims=True) + 1e-5)).reshape(x.shape)
    want = want * given.get("weight", np.ones(6))[:, None] + given.get("bias", np.zeros(6))[:, None]
    near(ops.group_norm(x, **given, groups=3), want, dtype)


F32, F16, INT = jnp.ones((2, 4)), jnp.ones((2, 4), jnp.float16), jnp.ones((2, 4), jnp.int32)
REFUSED = [
    (lambda: ops.linear(INT, F32), r"linear: expected x, weight of one floating dtype; got x: int32\[2,4\]"),
    (lambda: ops.linear(F16, F32), r"linear: expected x, weight of one floating dtype"),
    (lambda: ops.linear(F32, F32.T), r"linear: expected weight of shape \(out_features, in_features\) for the last"),
    (lambda: ops.linear(F32[0, 0], F32), r"linear: expected weight of shape"),
    (lambda: ops.linear(F32, F32, F32[0]), r"linear: expected bias of shape \(out_features,\); got bias: float32\[4\]"),
    (lambda: ops.linear(F32, F32, INT[:, 0]), r"linear: expected bias of one floating dtype"),
    (lambda: ops.embedding(F32, F32), r"embedding: expected index to be integers of shape \(\) or \(2, 4\)"),
    (
        lambda: ops.embedding(INT, F32[0]),
        r"embedding: expected weight of shape \(rows, size\); got weight: float32\[4\]",
    ),
    (lambda: ops.lstm_gates(F32, F16), r"lstm_gates: expected gates, cell of one floating dtype"),
    (lambda: ops.lstm_gates(F32, F32), r"lstm_gates: expected gates of shape \(\*batch, 4 \* size\)"),
    (lambda: ops.lstm_gates(F32[0, 0], F32[0, 0]), r"lstm_gates: expected gates of shape"),
    (lambda: ops.gru_gates(F32, F16, F32), r"gru_gates: expected input_gates, hidden_gates, hidden of one floating"),
    (lambda: ops.gru_gates(F32[:, :3], F32, F32[:, :1]), r"gru_gates: expected gates of shape \(\*batch, 3 \* size\)"),
    (
        lambda: ops.gru_gates(F32[:, :3], F32[:, :3], F32[:, :1], F32[0]),
        r"gru_gates: expected bias_n of shape \(size,\); got bias_n: float32\[4\], hidden: float32\[2,1\]",
    ),
    (lambda: ops.group_norm(INT, groups=2), r"group_norm: expected x of one floating dtype"),
    (lambda: ops.group_norm(F32[0], groups=2), r"group_norm: expected x of shape \(\*batch, channels, size\)"),
    (lambda: ops.group_norm(F32.T, groups=3), r"group_norm: expected groups to be a divisor of the channels of x; got"),
    (lambda: ops.group_norm(F32, groups=0), r"group_norm: expected groups to be a positive integer; got 0\."),
    (lambda: ops.group_norm(F32, groups=2.0), r"group_norm: expected groups to be a positive integer; got 2\.0\."),  # pyright: ignore[reportArgumentType]
    (lambda: ops.group_norm(F32, groups=2, eps="a"), r"group_norm: expected eps to be a number; got 'a'\."),  # pyright: ignore[reportArgumentType]
    (lambda: ops.group_norm(F32, F32[0], groups=2), r"group_norm: expected weight of shape \(channels,\); got weight"),
    (lambda: ops.group_norm(F32, None, F32[0], groups=2), r"group_norm: expected bias of shape \(channels,\)"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
