"""`activations="int8"`: what is quantized, and that kernels of all kinds multiply just that."""

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from eqxcallback import ops
from eqxcallback.ops.linear import (
    _reference as linear_reference,
    _reference_activations as linear_reference_activations,
    _reference_quantized as linear_reference_quantized,
)

from .. import table
from ..table import DTYPES, normal
from . import cases


int8_linear = functools.partial(ops.int8_linear, activations="int8")
INT8_REFERENCE = functools.partial(linear_reference.int8_linear, activations="int8")
BLOCKS_REFERENCE = functools.partial(linear_reference_quantized.quantized_linear, activations="int8")


def quantized_linear(encoding):
    return table.with_options(ops.quantized_linear, encoding=encoding, activations="int8")


def weights_of(out_features, in_features) -> Any:
    weight = np.random.default_rng(1).integers(-128, 128, (out_features, in_features), np.int8)
    return weight, normal(2, (out_features,), scale=0.01)


def quantized(x, block):
    """In f64, from the words of the documentation."""
    x = np.asarray(x, np.float64)
    if x.size == 0:
        return x
    parts = x.reshape(*x.shape[:-1], -1, block)
    step = np.abs(parts).max(-1, keepdims=True) / 127
    levels = np.divide(parts, step, out=np.zeros_like(parts), where=step > 0)
    return (np.rint(levels) * step).reshape(x.shape)


@pytest.mark.parametrize("block", [1, 4, 32])
def test_what_is_quantized(block):
    x = np.concatenate([normal(1, (5, 64)), [np.zeros(64), np.full(64, -3e38), np.arange(64) - 31.5]]).astype(
        np.float32
    )
    got = linear_reference_activations.quantize_activations(jnp.asarray(x), block)
    np.testing.assert_allclose(got, quantized(x, block), rtol=1e-6)
    parts = np.abs(x).reshape(8, -1, block)
    assert (np.abs(got - x).reshape(parts.shape) <= parts.max(-1, keepdims=True) / 254 * (1 + 1e-5)).all()


def test_blocks_that_are_not_finite_stay():
    x = np.full((4, 8), 0.3, np.float32)
    x[0, 1], x[1, 2], x[2, 5] = np.inf, np.nan, -np.inf
    got = np.asarray(linear_reference_activations.quantize_activations(jnp.asarray(x), 4))
    np.testing.assert_array_equal(got[:2, :4], x[:2, :4])
    np.testing.assert_array_equal(got[2, 4:], x[2, 4:])


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 33), (0,)])
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (64, 17), (37, 30), (0, 3), (65, 0), (200, 9)])
def test_int8_linear(batch, in_features, out_features, isa):
    weight, scale = weights_of(out_features, in_features)
    operands = [(normal(3, (*batch, in_features), dtype), weight, scale) for dtype in DTYPES]
    table.check_calls(table.Call(int8_linear, INT8_REFERENCE, args, in_features) for args in operands)


@pytest.mark.parametrize("rows", [1, 33])
def test_on_many_threads(rows, isa):
    args = (normal(3, (rows, 1000)), *weights_of(3001, 1000))
    table.check_calls([table.Call(int8_linear, INT8_REFERENCE, args, 1000)])
    for encoding in cases.ENCODINGS:
        reference = table.with_options(BLOCKS_REFERENCE, encoding=encoding)
        args = (normal(3, (rows, 992)), cases.blocks(2, 3001, 992, encoding))
        table.check_calls([table.Call(quantized_linear(encoding), reference, args, 992)])


@pytest.mark.parametrize("encoding", cases.ENCODINGS)
@pytest.mark.parametrize("rows", [0, 1, 3, 17])
@pytest.mark.parametrize(("in_blocks", "out_features"), [(0, 3), (1, 1), (3, 0), (5, 21)])
def test_quantized_linear(in_blocks, out_features, rows, encoding, isa):
    reference = table.with_options(BLOCKS_REFERENCE, encoding=encoding)
    blocks = cases.blocks(2, out_features, 32 * in_blocks, encoding)
    operands = [(normal(3, (rows, 32 * in_blocks), dtype), blocks) for dtype in DTYPES]
    table.check_calls(table.Call(quantized_linear(encoding), reference, args, 32 * in_blocks) for args in operands)


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(strategies.integers(1, 20), strategies.integers(1, 300), strategies.floats(-35, 38))
def test_sums_of_integers_are_exact(rows, size, exponent):
    """Scales of the weights are one, and steps powers of two, whatever the scale of x. The highest value is 127 steps."""
    rng = np.random.default_rng((rows, size))
    levels = rng.integers(-127, 128, (rows, size))
    levels[:, 0] = 127
    step = np.float32(2.0 ** np.floor(min(exponent, 30) * np.log2(10)))
    weight: Any = rng.integers(-128, 128, (3, size), np.int8)
    got = int8_linear(jnp.asarray((levels * step).astype(np.float32)), weight, jnp.ones(3))
    np.testing.assert_allclose(np.asarray(got, np.float64), levels @ weight.T * np.float64(step), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 1])
def test_the_highest_sums(size, isa):
    """An integer of 32 bits has room for 2^16 products, with weights 128 too high."""
    weight: Any = np.array([[127], [-128]], np.int8).repeat(size, 1)
    x: Any = np.array([[127.0], [-127.0]], np.float32).repeat(9, 0).repeat(size, 1)
    got = int8_linear(x, weight, jnp.ones(2))
    np.testing.assert_allclose(got, x[:, :1] * weight[:, 0] * float(size), rtol=1e-4)


def test_rows_of_extreme_values(isa):
    x = normal(1, (4, 64))
    x[0, 3], x[1, 3], x[2] = np.inf, np.nan, x[2] * 1e-40
    weight, scale = map(jnp.asarray, weights_of(3, 64))
    functions = [(lambda x: int8_linear(x, weight, scale), lambda x: INT8_REFERENCE(x, weight, scale))]
    for encoding in cases.ENCODINGS:
        blocks = jnp.asarray(cases.blocks(2, 3, 64, encoding))
        reference = functools.partial(BLOCKS_REFERENCE, blocks=blocks, encoding=encoding)
        functions.append((functools.partial(quantized_linear(encoding), blocks=blocks), reference))
    for rows in (x, x[0], x[1], x[2], x[3] * np.float32(1e33)):
        for function, reference in functions:
            got, want = (np.asarray(f(jnp.asarray(rows))) for f in (function, reference))
            # Sums with infinities may be NaN, by their order.
            finite = np.isfinite(want)
            np.testing.assert_array_equal(np.isfinite(got), finite)
            np.testing.assert_allclose(got[finite], want[finite], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_sums_over_small_weights_of_numbers_near_the_highest(rows, activations, isa):
    """They are finite, also where those over the integers of the weights are not."""
    weight = 1e-3 * normal(2, (13, 128))
    x = np.float32(1e37) * (normal(1, (rows, 128)) / 4 + 1)
    encodings: Any = cases.ENCODINGS
    for encoding in encodings:
        blocks = ops.quantize(jnp.asarray(weight), encoding=encoding)
        reference = linear_reference_quantized.quantized_linear if activations == "exact" else BLOCKS_REFERENCE
        got = ops.quantized_linear(x, blocks, encoding=encoding, activations=activations, implementation="native")
        want = reference(jnp.asarray(x), blocks, encoding=encoding)
        assert np.isfinite(want).all()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
    x, (integers, scale) = 1e-10 * normal(1, (rows, 128)), weights_of(13, 128)
    scale = 1e37 * np.sign(scale)
    got = ops.int8_linear(x, integers, scale, activations=activations, implementation="native")
    reference = linear_reference.int8_linear if activations == "exact" else INT8_REFERENCE
    want = reference(*map(jnp.asarray, (x, integers, scale)))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_the_derivative_is_that_of_the_exact_product():
    """To x and, of the rounded x, to the scale: forward, reverse and second order."""
    x, (weight, scale) = jnp.asarray(normal(1, (5, 64))), weights_of(3, 64)

    def loss(x, scale, **options):
        return jnp.sum(jnp.tanh(ops.int8_linear(x, weight, scale, **options)))

    for transform in (jax.grad, lambda f, argnums: jax.jacfwd(f, argnums)):
        got = jax.jit(transform(functools.partial(loss, activations="int8"), (0, 1)))(x, scale)
        plain = lambda x, scale: loss(linear_reference_activations.quantize_activations(x, 64), scale)
        want = jax.jit(transform(plain, (0, 1)))(x, scale)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)
    linear = jax.vjp(lambda x: int8_linear(x, weight, scale), x)[1]
    exact = jax.vjp(lambda x: ops.int8_linear(x, weight, scale), x)[1]
    np.testing.assert_allclose(linear(jnp.ones((5, 3)))[0], exact(jnp.ones((5, 3)))[0], rtol=1e-5)
    hessian = jax.jit(jax.hessian(lambda x: jnp.sum(int8_linear(x, weight, scale) ** 2)))(x[0])
    np.testing.assert_allclose(hessian, 2 * (weight.T * scale**2) @ weight.astype(np.float32), rtol=1e-4, atol=1e-3)


def test_a_batch_is_one_call():
    weight, scale = weights_of(3, 64)
    blocks = cases.blocks(2, 3, 64, "Q4_1")
    for f, name in (
        (lambda x: int8_linear(x, weight, scale), "int8_linear"),
        (lambda x: quantized_linear("Q4_1")(x, blocks), "quantized_linear"),
    ):
        text = jax.jit(jax.vmap(jax.vmap(f))).lower(jnp.ones((2, 3, 64))).as_text()
        assert text.count(f"custom_call @eqxcallback_{name}(") == 1


@pytest.mark.parametrize("name", ["int8_linear", "quantized_linear"])
def test_wrong_names(name):
    operands: Any = weights_of(3, 64) if name == "int8_linear" else (cases.blocks(2, 3, 64, "Q4_1"),)
    options: Any = {"activations": "int4"} | ({} if name == "int8_linear" else {"encoding": "Q4_1"})
    with pytest.raises(ValueError, match=rf"{name}: expected activations to be one of exact, int8; got 'int4'\."):
        getattr(ops, name)(jnp.ones(64), *operands, **options)
