"""Arguments of layers and caches that were taken for others: each is what it says, or one clear error."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import nn, ops


KEY = jax.random.key(0)
ROWS = jnp.ones((2, 1, 4))
MINUS_3: Any = -3
NO_INTEGER: Any = 1.9
TEXT: Any = "scalar"


def cache_of(**options):
    return nn.KVCache(8, 1, 4, **options)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    "call",
    [
        lambda cache, valid: cache.append(ROWS, ROWS, valid=valid),
        lambda cache, valid: cache.append_rotary(jnp.ones((2, 3, 4)), jnp.ones((2, 2)), jnp.ones((2, 2)), valid=valid)[
            1
        ],
        lambda cache, valid: cache.update(ROWS, ROWS, ROWS, valid=valid)[1],
    ],
    ids=["append", "append_rotary", "update"],
)
def test_valid(call, window):
    cache = cache_of(window=window)
    for valid in (1, np.int64(1), jnp.int32(1), np.array(1)):
        assert call(cache, valid).length == 1
    for valid in (NO_INTEGER, MINUS_3, 3, True):
        with pytest.raises(ValueError, match=r"KVCache\.\w+: expected valid from 0 to 2; got"):
            call(cache, valid)
    for valid in (jnp.float32(1), jnp.array([1, 2])):
        with pytest.raises(ValueError, match=r"KVCache\.\w+: expected valid to be integers of shape \(\); got valid: "):
            call(cache, valid)


@pytest.mark.wrong_types  # a list in place of an array
def test_offset_and_slopes():
    cache = cache_of().append(ROWS, ROWS)
    with pytest.raises(ValueError, match=r"expected offset to be integers of shape \(\)"):
        cache.attend(ROWS, offset=NO_INTEGER)
    q, four = jnp.ones((4, 4)), jnp.arange(1.0, 5.0)
    for window in (None, 4):
        cache = cache_of(window=window).append(ROWS, jnp.arange(8.0).reshape(2, 1, 4))
        as_list: Any = four.tolist()
        np.testing.assert_array_equal(cache.attend(q, alibi_slopes=as_list), cache.attend(q, alibi_slopes=four))
        for slopes in (jnp.ones(1), jnp.ones(4, jnp.int32)):
            with pytest.raises(ValueError, match=r"expected alibi_slopes of shape \(4,\) and a floating dtype; got"):
                cache.attend(q, alibi_slopes=slopes)


@pytest.mark.wrong_types  # Equinox takes them
@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")  # Equinox's
@pytest.mark.parametrize("make", [np.float32, np.array, jnp.float32, float])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, lambda size, eps: nn.GroupNorm(2, size, eps=eps)])
def test_an_epsilon_that_is_an_array(norm, make):
    """As Equinox takes it."""
    x = jnp.arange(8.0)
    np.testing.assert_array_equal(norm(8, eps=make(1e-3))(x), norm(8, eps=1e-3)(x))


class Square(eqx.Module):
    """A projection that is not a linear layer, and has an array of integers."""

    kind: jax.Array

    def __call__(self, x):
        return x * x


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: eqx.tree_at(lambda x: x.query_proj, layer, nn.QuantizedLinear.from_linear(layer.query_proj)),
        lambda layer: eqx.tree_at(lambda x: (x.key_proj, x.output_proj), layer, (Square(jnp.arange(3)),) * 2),
        lambda layer: eqx.tree_at(lambda x: x.dropout.p, layer, np.float32(0.1)),
    ],
    ids=["quantized", "another", "a rate of NumPy's"],
)
def test_multihead_attention_has_no_array_of_queries_times_keys(change):
    layer = change(nn.MultiheadAttention(4, 64, dropout_p=0.1, key=KEY))
    x = jax.random.normal(KEY, (96, 64))
    text = str(jax.make_jaxpr(lambda x: layer(x, x, x, key=KEY))(x))
    assert "96,96" not in text
    assert "attention" in text
    plain = eqx.tree_at(
        lambda x: (x.query_proj, x.key_proj, x.output_proj),
        eqx.nn.MultiheadAttention(4, 64, dropout_p=0.1, key=KEY),
        (layer.query_proj, layer.key_proj, layer.output_proj),
    )
    np.testing.assert_allclose(layer(x, x, x, key=KEY), plain(x, x, x, key=KEY), rtol=1e-3, atol=1e-4)


def test_heads_that_are_no_floats_are_equinox():
    layer, plain = (
        eqx.tree_at(lambda x: x.value_proj.weight, cls(2, 4, key=KEY), jnp.full((4, 4), 1j))
        for cls in (nn.MultiheadAttention, eqx.nn.MultiheadAttention)
    )
    x = jax.random.normal(KEY, (3, 4))
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_allclose(layer(x, x, x), plain(x, x, x), rtol=1e-5)


def test_choices_of_a_quantised_layer_hold_for_all_of_it():
    layer = nn.QuantizedLinear.from_linear(nn.Linear(64, 64, key=KEY), encoding="Q4_1", implementation="reference")
    calls = eqxc.inspect(layer.then_swiglu, jnp.ones(64)).calls
    assert {call.lane for call in calls} == {"reference"}
    assert len(calls) == 2


@pytest.mark.wrong_types  # a list in place of an array
@pytest.mark.parametrize("encoding", ["int8", "Q4_1", "Q4_1_R16"])
def test_rows_of_a_list(encoding):
    layer = nn.QuantizedLinear.from_linear(
        nn.Linear(64, 32, key=KEY), encoding="int8" if encoding == "int8" else "Q4_1"
    )
    layer = layer.packed() if encoding == "Q4_1_R16" else layer
    rows: Any = [0, 5]
    np.testing.assert_array_equal(layer.rows(rows), layer.rows(jnp.array(rows)))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: nn.GroupedQueryAttention(2, 4, rope_theta=0, key=KEY),
            ValueError,
            "rope_theta to be a positive number or None; got 0",
        ),
        (
            lambda: nn.GroupedQueryAttention(2, 4, rope_theta=-1, key=KEY),
            ValueError,
            "rope_theta to be a positive number",
        ),
        (
            lambda: nn.GroupedQueryAttention(2, 4, causal=TEXT, key=KEY),
            TypeError,
            "GroupedQueryAttention: expected causal to be True or",
        ),
        (
            lambda: nn.SwiGLU(4, -4, key=KEY),
            ValueError,
            "SwiGLU: expected hidden_features to be an integer of at least 0; got -4",
        ),
        (
            lambda: nn.GEGLU(TEXT, 4, key=KEY),
            ValueError,
            "GEGLU: expected in_features to be an integer of at least 0; got 'scalar'",
        ),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_losses_of_rows_without_features():
    x, weight, labels = jnp.ones((3, 0)), jnp.ones((5, 0)), jnp.arange(3)
    expected_losses: dict[Any, float] = {"mean": np.log(5), "sum": 3 * np.log(5)}
    for reduction, expected in expected_losses.items():
        loss = ops.linear_cross_entropy(x, weight, labels, reduction=reduction)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
