"""LayerNorm, RMSNorm and GroupNorm: what tests/nn/test_drop_ins.py does not say of all layers."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import nn

from .drop_ins import randomized


QUICK = {"xla_backend_optimization_level": 0}
OPTIONS = [
    {},
    {"use_bias": False},
    {"use_weight": False},
    {"use_weight": False, "use_bias": False},
    {"eps": 0.5},
    {"dtype": jnp.bfloat16},
    {"dtype": jnp.float16},
]


def normal(*shape, dtype: Any = np.float32, seed=0) -> Any:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_parameters_of_one_dtype_and_inputs_of_another(name, options, dtype):
    """In f32, also where Equinox needs promotion to be standard for it."""
    ours, theirs = (randomized(getattr(module, name)((3, 4), **options)) for module in (nn, eqx.nn))
    x = normal(2, 3, 4, dtype=dtype)
    got = jax.jit(jax.vmap(ours), compiler_options=QUICK)(x)
    with jax.numpy_dtype_promotion("standard"):
        want = jax.jit(jax.vmap(theirs), compiler_options=QUICK)(x)
    assert got.dtype == want.dtype == dtype
    # Equinox rounds before it adds a bias.
    tolerance = {jnp.float32: 1e-6, jnp.bfloat16: 2.0**-6, jnp.float16: 2.0**-9}[dtype]
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=tolerance, atol=tolerance)


@pytest.mark.wrong_types  # it is passed on whatever it is
@pytest.mark.parametrize("layer", [nn.LayerNorm(3), nn.RMSNorm(3), nn.GroupNorm(1, 3)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_state_is_passed_on(layer, dtype):
    x, state = jnp.arange(3, dtype=dtype), object()
    out, same = layer(x, state, key=jax.random.key(0))
    assert same is state
    np.testing.assert_array_equal(out, layer(x, key=None))
    sequential = eqx.nn.Sequential([eqx.nn.Identity(), layer])
    np.testing.assert_array_equal(sequential(x), out)


@pytest.mark.filterwarnings("always")
def test_the_deprecated_argument():
    for affine in (True, False):
        with pytest.warns(UserWarning, match="elementwise_affine"):
            layer = nn.LayerNorm(3, elementwise_affine=affine)
        assert (layer.use_weight, layer.use_bias) == (affine, affine)
        assert (layer.weight is not None) == affine


def test_parameters_that_equinox_broadcasts():
    """Put there by hand. Ops take no such ones."""

    def results(module):
        norm = eqx.tree_at(lambda norm: norm.weight, module.LayerNorm((2, 3)), jnp.full((1, 1), 2.0))
        return norm(jnp.arange(6.0).reshape(2, 3)), module.GroupNorm(1, 1)(jnp.arange(6.0).reshape(3, 2))

    for got, want in zip(results(nn), results(eqx.nn), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "GroupNorm"])
def test_large_and_small_values(name):
    """A norm of 1e18, whose square is still finite, and values that epsilon hides."""
    layer = {"LayerNorm": nn.LayerNorm(100), "RMSNorm": nn.RMSNorm(100), "GroupNorm": nn.GroupNorm(1, 100)}[name]
    for scale in (1e17, 1e-3, 1e-30, 0.0):
        x = normal(100) * np.float32(scale)
        wide = x.astype(np.float64)
        wide = wide - (0 if name == "RMSNorm" else wide.mean())
        np.testing.assert_allclose(layer(x), wide / np.sqrt(np.mean(wide**2) + 1e-5), rtol=1e-4, atol=1e-6)


def test_f16_does_not_overflow():
    x = jnp.tile(jnp.array([-6e4, 6e4], jnp.float16), (4, 3))
    for layer in (nn.LayerNorm(6), nn.RMSNorm(6), nn.GroupNorm(1, 6)):
        np.testing.assert_allclose(np.abs(jax.vmap(layer)(x).astype(np.float32)), 1, rtol=1e-3)


def test_vmap_is_one_call():
    text = jax.jit(jax.vmap(randomized(nn.RMSNorm(5)))).lower(jnp.ones((7, 5))).as_text()
    assert text.count("custom_call @eqxcallback_norm(") == 1
    assert "tensor<7x5xf32>, tensor<5xf32>" in text
    assert "while" not in text


def test_an_rms_norm_with_a_bias_is_one_call_that_rounds_once():
    """As Equinox has it by default."""
    layer = eqxc.nn.RMSNorm(64, dtype=jnp.bfloat16)
    values = np.random.default_rng(0).normal(size=(3, 64)).astype(jnp.bfloat16)
    layer = eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, tuple(jnp.asarray(values[:2])))
    x = values[2]
    (call,) = eqxc.inspect(layer, x).calls
    assert (call.op, call.lane, call.passed_over) == ("rms_norm", "native", ())
    text = jax.jit(lambda x: layer(x)).lower(x).as_text()
    assert text.count("custom_call @eqxcallback_norm") == 1
    assert "stablehlo.add" not in text
    wide = [np.asarray(value, np.float64) for value in values]
    want = wide[2] / np.sqrt(np.mean(wide[2] ** 2) + layer.eps) * wide[0] + wide[1]
    np.testing.assert_array_equal(layer(x), want.astype(np.float32).astype(jnp.bfloat16))
