"""Norms: layers' kernels, rows of all means and sizes, and formulas in f64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops
from eqxcallback.ops.norm import _reference as norm_reference

from .. import table
from ..formulas import f64, near
from ..gradients import gradients
from ..table import BATCHES, DTYPES, normal
from . import cases


pytestmark = pytest.mark.any_jax_version


@pytest.mark.parametrize("shape", [(6, 1), (4, 7), (3, 6, 16), (2, 3, 4, 33), (0, 4, 3), (33, 6, 500)])
def test_group_norm(shape, isa):
    terms = 2 * shape[-1] * shape[-2]
    for dtype in DTYPES:
        x, weight, bias = normal(1, shape, dtype), normal(2, shape[-2:-1]), normal(3, shape[-2:-1])
        calls = []
        for groups in (1, 2, shape[-2]):
            options = {"groups": groups, "eps": 1e-5}
            native = table.with_options(ops.group_norm, **options)
            reference = table.with_options(norm_reference.group_norm, **options)
            for args in ((x,), (x, weight), (x, weight, bias), (x, None, bias)):
                calls.append(table.Call(native, reference, args, terms))
        table.check_calls(calls)


@pytest.mark.parametrize("mean", [0.0, 0.5, 1.7, -1.8, 3.0, 30.0, -1e3, 1e5])
def test_norms_of_rows_with_a_mean(mean, isa):
    """A row whose mean is far from zero: the mean square has few digits of the variance."""
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
            want = norm_reference.rms_norm(total.astype(jnp.float32), *map(jnp.asarray, parameters), eps=1e-5)
            table.tolerate(got, np.asarray(want), shape[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("parameters", [(), ("weight",), ("bias",), ("weight", "bias")])
def test_group_norm_is_its_formula(dtype, batch, parameters):
    x = normal(1, (*batch, 6, 7), dtype)
    given = {name: normal(seed, (6,)) for seed, name in enumerate(parameters)}
    (wide,) = f64(x)
    parts = wide.reshape(*batch, 3, 14)
    parts = parts - parts.mean(-1, keepdims=True)
    want = (parts / np.sqrt(np.mean(parts**2, axis=-1, keepdims=True) + 1e-5)).reshape(x.shape)
    want = want * given.get("weight", np.ones(6))[:, None] + given.get("bias", np.zeros(6))[:, None]
    near(ops.group_norm(x, **given, groups=3), want, dtype)


@pytest.mark.parametrize("size", [1e13, 1e18, 1e25, 1e35])
@pytest.mark.parametrize("make", [cases.rms_norm, cases.layer_norm], ids=lambda make: make.__name__)
def test_squares_that_overflow(make, size, isa):
    """A norm does not depend on the size of a row, and its derivative is inverse to it."""
    small = make(DTYPES[0], (5, 70))
    factors = np.array([1, size, size, 1, size], np.float32)[:, None]
    large = table.Case(small.op, small.reference, (small.args[0] * factors, *small.args[1:]), small.terms)
    want, upstream = small.want(), normal(9, (5, 70))
    for function in (large.op, large.reference):
        np.testing.assert_allclose(table.quickly_compiled(function)(*large.args), want, rtol=2e-4, atol=2e-4)
        results = gradients(function, large.args, upstream)
        expected = gradients(small.reference, small.args, upstream)
        np.testing.assert_allclose(results[0] * factors, expected[0], rtol=2e-4, atol=2e-4)
        for got, exact in zip(results[1:], expected[1:], strict=True):
            np.testing.assert_allclose(got, exact, rtol=2e-4, atol=2e-4)
