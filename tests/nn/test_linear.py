"""Linear and MLP: what tests/nn/test_drop_ins.py does not say of all layers."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import nn


KEY = jax.random.key(0)


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def program(f, *args):
    return jax.jit(lambda *args: f(*args)).lower(*args).as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("batch", [(), (17,), (2, 17)])
def test_it_is_one_product(dtype, batch):
    """No transposition and no loop, and no call of ours but for few rows of 16 bits: what XLA makes best of it."""
    f = nn.Linear(3, 5, dtype=dtype, key=KEY)
    for _ in batch:
        f = jax.vmap(f)
    text = program(f, jnp.ones((*batch, 3), dtype))
    ours = dtype == jnp.bfloat16 and not batch
    assert text.count("stablehlo.dot_general") == (not ours)
    assert text.count("stablehlo.custom_call @eqxcallback_linear") == text.count("stablehlo.custom_call") == ours
    assert not [word for word in ("transpose", "while", "gather") if f"stablehlo.{word}" in text]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.usefixtures("xlas_bf16")
def test_gradients_are_products_of_the_own_dtype(dtype):
    layer = nn.Linear(3, 5, dtype=dtype, key=KEY)

    def loss(weight, x):
        with_weight = eqx.tree_at(lambda layer: layer.weight, layer, weight)
        return jax.vmap(with_weight)(x).astype(jnp.float32).sum()

    x = jnp.ones((7, 3), dtype)
    for argnums, products in ((0, 1), (1, 1), ((0, 1), 2)):
        text = program(jax.grad(loss, argnums), layer.weight, x)
        name = {jnp.float32: "f32", jnp.bfloat16: "bf16", jnp.float16: "f16"}[dtype]
        lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        # Of bf16 on a CPU the sums are f32, with which XLA multiplies bf16 there.
        types = 2 if dtype == jnp.bfloat16 else 3
        of_dtype = [line for line in lines if line.count(f"x{name}>") == types]
        # The product itself may be left in the program before XLA sees that nobody needs its result.
        assert len(of_dtype) >= products
        assert len(lines) <= products + 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_are_rounded_once(dtype):
    """Products and bias are summed in f64, to the nearest value of the dtype; each sum in that dtype would err by more."""
    layer = nn.Linear(300, 40, dtype=dtype, key=KEY)
    x = jnp.asarray(normal(300, dtype=dtype))
    weight, bias, wide = (np.asarray(array, np.float64) for array in (layer.weight, layer.bias, x))
    want = (weight @ wide + bias).astype(dtype).astype(np.float64)
    got = np.asarray(layer(x), np.float64)
    assert np.mean(got == want) > 0.95
    epsilon = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got, want, rtol=epsilon, atol=epsilon / 16)


def test_weights_of_other_kinds():
    """The weight may be anything that Equinox can multiply with `@`."""

    class Twice(eqx.Module):
        weight: jax.Array

        def __matmul__(self, x):
            return 2 * (self.weight @ x)

    layer = nn.Linear(3, 5, use_bias=False, key=KEY)
    other = eqx.tree_at(lambda layer: layer.weight, layer, Twice(layer.weight))
    x = jnp.ones(3)
    np.testing.assert_allclose(other(x), 2 * layer(x), rtol=1e-6)


def test_inputs_of_other_kinds():
    ours, theirs = (module.Linear("scalar", 5, key=KEY) for module in (nn, eqx.nn))
    for x in (2.0, np.float32(2), jnp.float32(2), np.array(2.0, np.float32)):
        got, want = ours(x), theirs(x)
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-6)
    matrix = jnp.ones((3, 4))
    ours, theirs = (module.Linear(3, 5, use_bias=False, key=KEY) for module in (nn, eqx.nn))
    np.testing.assert_array_equal(ours(matrix), theirs(matrix))


@pytest.mark.parametrize(("depth", "scan"), [(0, False), (1, False), (3, False), (0, True), (1, True), (3, True)])
def test_the_layers_of_an_mlp(depth, scan):
    ours, theirs = (module.MLP(3, 2, 5, depth, scan=scan, key=KEY) for module in (nn, eqx.nn))
    assert len(ours.layers) == len(theirs.layers)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert type(mine) is nn.Linear
        assert (mine.in_features, mine.out_features) == (other.in_features, other.out_features)
        assert mine.weight.shape == other.weight.shape
    layers: Any = nn.MLP(3, 2, 5, depth, scan=scan, key=KEY, implementation="reference").layers
    assert {layer.implementation for layer in layers} == {"reference"}


def test_an_mlp_is_as_many_products_as_layers():
    text = program(jax.vmap(nn.MLP(3, 2, 5, 3, key=KEY)), jnp.ones((7, 3)))
    assert text.count("stablehlo.dot_general") == 4
    assert "while" not in text
    text = program(jax.vmap(nn.MLP(3, 2, 5, 3, scan=True, key=KEY)), jnp.ones((7, 3)))
    assert text.count("stablehlo.while") == 1


def calls_of_gelu(activation, **options):
    mlp = nn.MLP(3, 2, 5, 3, activation, key=KEY, **options)
    return program(jax.vmap(mlp), jnp.ones((7, 3))).count("eqxcallback_gelu")


def test_gelu_in_an_mlp_is_the_op():
    exact = functools.partial(jax.nn.gelu, approximate=False)
    assert [calls_of_gelu(activation) for activation in (jax.nn.gelu, exact)] == [3, 3]
    assert calls_of_gelu(jax.nn.gelu, final_activation=exact) == 4
    assert calls_of_gelu(jax.nn.gelu, scan=True) == 2  # before the loop, and in it
    assert calls_of_gelu(jax.nn.gelu, implementation="reference") == 0
    assert calls_of_gelu(lambda x: jax.nn.gelu(x)) == 0


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32])
def test_gelu_in_an_mlp_of_other_numbers_is_jaxs(dtype):
    def outputs(module):
        mlp = module.MLP(3, 2, 5, 1, jax.nn.gelu, use_bias=False, use_final_bias=False, key=KEY)
        mlp = jax.tree.map(lambda x: jnp.round(4 * x).astype(dtype) if eqx.is_inexact_array(x) else x, mlp)
        with jax.numpy_dtype_promotion("standard"):  # an integer's GELU is a float, times integers
            return mlp(jnp.arange(3, dtype=dtype))

    got, want = outputs(nn), outputs(eqx.nn)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-5)
