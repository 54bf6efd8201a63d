"""Native kernels of layers, everywhere: shapes, options, values."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops, reference

from . import cases
from .cases import DTYPES, normal


F32 = jnp.float32


def check(native, definition, args, terms=1, **options):
    wide = [np.asarray(x, np.float32) if getattr(x, "dtype", None) in DTYPES else x for x in args]
    got = cases.quickly_compiled(_op(native, **options))(*args)
    want = cases.quickly_compiled(_op(definition, **options))(*wide)
    for one, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == args[0].dtype
        cases.tolerate(one, np.asarray(exact), terms)


@functools.cache
def _op(function, **options):
    return functools.partial(function, **options)


@pytest.mark.parametrize("shape", [(6, 1), (4, 7), (3, 6, 16), (2, 3, 4, 33), (0, 4, 3), (33, 6, 500)])
def test_group_norm(shape, isa):
    for dtype in DTYPES:
        x, weight, bias = normal(1, shape, dtype), normal(2, shape[-2:-1]), normal(3, shape[-2:-1])
        terms = 2 * shape[-1] * shape[-2]
        for groups in (1, 2, shape[-2]):
            for args in ((x,), (x, weight), (x, weight, bias), (x, None, bias)):
                check(ops.group_norm, reference.group_norm, args, terms, groups=groups, eps=1e-5)


@pytest.mark.parametrize("mean", [0.0, 0.5, 1.7, -1.8, 3.0, 30.0, -1e3, 1e5])
def test_norms_of_rows_with_a_mean(mean, isa):
    """Of a row whose mean is far from zero, the mean square has few digits of the variance."""
    x = normal(1, (5, 300)) + np.float32(mean)
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    grouped = ops.group_norm(x[..., None], groups=1, eps=1e-5)[..., 0]
    for got in (ops.layer_norm(x, eps=1e-5), grouped):
        np.testing.assert_allclose(got, exact, rtol=1e-6, atol=4e-7 * (1 + abs(mean)))


@pytest.mark.parametrize("value", [1.0, 1e13, 1e18, 1e30, 3e38])
def test_norms_of_rows_of_one_value(value, isa):
    for size in (1, 4, 32):  # of which sums and means are exact
        x = jnp.full((2, size), value, jnp.float32)
        np.testing.assert_array_equal(ops.layer_norm(x), jnp.zeros_like(x))
        np.testing.assert_array_equal(ops.group_norm(x[..., None], groups=1), jnp.zeros_like(x)[..., None])
        np.testing.assert_allclose(ops.rms_norm(x), 1, rtol=1e-5)
        for norm in (ops.layer_norm, ops.rms_norm):
            assert jnp.all(jnp.isfinite(jax.grad(lambda x, norm=norm: norm(x)[0, 0])(x)))


@pytest.mark.parametrize("shape", [(17,), (3, 1), (2, 3, 64), (0, 3), (101, 303)])
def test_add_rms_norm(shape, isa):
    for dtype in DTYPES:
        x, residual, weight = normal(1, shape, dtype), normal(2, shape, dtype), normal(3, shape[-1:])
        for parameters in ((), (weight,)):
            got, total = ops.add_rms_norm(x, residual, *parameters, eps=1e-5)
            np.testing.assert_array_equal(total, jnp.asarray(x) + jnp.asarray(residual))
            want = reference.rms_norm(total.astype(F32), *parameters, eps=1e-5)
            cases.tolerate(got, np.asarray(want), shape[-1])


@pytest.mark.parametrize("approximate", [True, False])
@pytest.mark.parametrize("shape", [(34,), (3, 2), (2, 3, 126), (0, 4), (101, 602)])
def test_geglu(shape, approximate, isa):
    for dtype in DTYPES:
        gate, up = normal(1, shape, dtype, 3.0), normal(2, shape, dtype)
        for args in ((gate,), (gate, up)):
            check(ops.geglu, reference.geglu, args, approximate=approximate)
            wide = [x.astype(np.float32) for x in args]
            got, want = (
                cases.quickly_compiled(_grads(_op(f, approximate=approximate), len(args)))(*of)
                for f, of in ((ops.geglu, args), (reference.geglu, wide))
            )
            for one, exact in zip(got, want, strict=True):
                cases.tolerate(one, np.asarray(exact), 1000)  # of the definition, in f32


@functools.cache
def _grads(f, count):
    return jax.grad(lambda *args: f(*args).astype(F32).sum(), tuple(range(count)))


@pytest.mark.parametrize("approximate", [True, False])
def test_gelu_everywhere(approximate, isa):
    """To f32's own precision where it is near the identity or 0, and wherever the argument lies; NaN goes through."""
    x = np.concatenate([np.linspace(-20, 20, 40_001), [0.0, -0.0, 1e-30, -1e-30, 1e5, -1e5, 3e38, -3e38, np.nan]])
    x = x.astype(np.float32)[:, None]
    got = np.asarray(ops.geglu(jnp.asarray(x), jnp.ones_like(x), approximate=approximate), np.float64)[:, 0]
    wide = x.astype(np.float64)[:, 0]
    with np.errstate(over="ignore"):
        if approximate:
            inner = np.clip(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3), -1e4, 1e4)
            want = wide / (1 + np.exp(np.minimum(-2 * inner, 700)))
        else:
            want = wide * 0.5 * np.vectorize(math.erfc)(-wide / math.sqrt(2))
    np.testing.assert_allclose(got, want, rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(17,), (3, 1), (2, 3, 64), (0, 3), (101, 301)])
def test_gates(shape, isa):
    for dtype in DTYPES:
        *batch, size = shape
        gates, cell = normal(1, (*batch, 4 * size), dtype, 3.0), normal(2, shape, dtype)
        check(ops.lstm_gates, reference.lstm_gates, (gates, cell), 10)
        inputs, states = (normal(seed, (*batch, 3 * size), dtype, 2.0) for seed in (3, 4))
        for bias in ((), (normal(5, (size,)),)):
            check(ops.gru_gates, reference.gru_gates, (inputs, states, cell, *bias), 10)


def test_tanh_everywhere(isa):
    """Of a cell that only the candidate enters."""
    x = np.concatenate([np.linspace(-12, 12, 24_001), [1e-30, -1e-3, 90, -90, 3e38, -3e38, np.nan]]).astype(np.float32)
    gates = np.stack([np.full_like(x, 100), np.full_like(x, -100), x, np.full_like(x, 100)], axis=-1)
    hidden, cell = ops.lstm_gates(jnp.asarray(gates), jnp.zeros((len(x), 1)))
    np.testing.assert_allclose(np.asarray(cell)[:, 0], np.tanh(x.astype(np.float64)), rtol=5e-7)
    np.testing.assert_allclose(np.asarray(hidden)[:, 0], np.tanh(np.tanh(x.astype(np.float64))), rtol=1e-6)


@pytest.mark.parametrize("batch", [(), (2,), (3, 7), (0,)])
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (64, 17), (37, 30), (0, 3), (65, 0)])
def test_linear(batch, in_features, out_features, isa):
    linear = _op(ops.linear, implementation="native")
    for dtype in DTYPES:
        x, weight = normal(1, (*batch, in_features), dtype), normal(2, (out_features, in_features), dtype, 0.1)
        check(linear, reference.linear, (x, weight), in_features)
        check(linear, reference.linear, (x, weight, normal(3, (out_features,))), in_features)


@pytest.mark.parametrize("batch", [(), (6,)])
def test_linear_on_many_threads(batch, isa):
    linear = _op(ops.linear, implementation="native")
    for dtype in DTYPES:
        args = (normal(1, (*batch, 1000), dtype), normal(2, (3001, 1000), dtype, 0.1), normal(3, (3001,)))
        check(linear, reference.linear, args, 1000)


@pytest.mark.parametrize(
    ("rows", "dtype", "calls"), [(1, DTYPES[1], 1), (16, DTYPES[2], 1), (17, DTYPES[1], 0), (1, DTYPES[0], 0)]
)
def test_few_rows_of_sixteen_bits_are_for_the_kernel(rows, dtype, calls):
    x, weight = normal(1, (rows, 33), dtype), normal(2, (5, 33), dtype)
    for f in (ops.linear, jax.vmap(ops.linear, (0, None))):
        assert jax.jit(f).lower(x, weight).as_text().count("custom_call @eqxcallback_linear") == calls


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 33), (0,)])
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (64, 17), (37, 30), (0, 3), (65, 0)])
def test_int8_linear(batch, in_features, out_features, isa):
    weight: Any = np.random.default_rng(1).integers(-128, 128, (out_features, in_features), np.int8)
    scale = normal(2, (out_features,), scale=0.01)
    for dtype in DTYPES:
        check(
            ops.int8_linear,
            reference.int8_linear,
            (normal(3, (*batch, in_features), dtype), weight, scale),
            in_features,
        )


@pytest.mark.parametrize("batch", [(), (33,)])
def test_int8_linear_on_many_threads(batch, isa):
    weight: Any = np.random.default_rng(1).integers(-128, 128, (3001, 1000), np.int8)
    for dtype in DTYPES:
        check(
            ops.int8_linear,
            reference.int8_linear,
            (normal(3, (*batch, 1000), dtype), weight, normal(2, (3001,), scale=0.01)),
            1000,
        )


OPTIONS = [{"label_smoothing": 0.1}, {"z_loss": 0.01}, {"ignore_index": 3}, {"ignore_index": -1, "z_loss": 0.1}]


@pytest.mark.parametrize("options", [*OPTIONS, {"label_smoothing": 1.0, "z_loss": 0.2, "ignore_index": 0}], ids=str)
@pytest.mark.parametrize("shape", [(5,), (7, 37), (2, 3, 5000)])
def test_options_of_the_loss(shape, options, isa):
    labels: Any = np.random.default_rng(4).integers(-4, 4, shape[:-1]).astype(np.int32)
    for dtype in DTYPES:
        logits = normal(1, shape, dtype, 3.0)
        wide = logits.astype(np.float32)
        got, want = (
            cases.quickly_compiled(_op(f, **options))(x, labels)
            for f, x in ((ops.softmax_cross_entropy, logits), (reference.softmax_cross_entropy, wide))
        )
        assert got.dtype == np.float32
        cases.tolerate(got, np.asarray(want), shape[-1])
        got, want = (
            cases.quickly_compiled(_grads(_op(f, **options), 1))(x, labels)
            for f, x in ((ops.softmax_cross_entropy, logits), (reference.softmax_cross_entropy, wide))
        )
        cases.tolerate(got[0], np.asarray(want[0]), shape[-1])
