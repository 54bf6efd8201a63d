"""Embedding: what tests/nn/test_drop_ins.py does not say of all layers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import nn


KEY = jax.random.key(0)


@pytest.mark.parametrize("index", [0, 4, -1, -5, 5, 100, -6, -100, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("kind", [int, np.int32, jnp.int32, np.int64, "traced"])
def test_every_index(index, kind):
    ours, theirs = (module.Embedding(5, 3, key=KEY) for module in (nn, eqx.nn))
    if kind == "traced":
        got, want = (eqx.filter_jit(layer)(jnp.int32(index)) for layer in (ours, theirs))
    else:
        got, want = ours(kind(index)), theirs(jnp.int32(index))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint32])
def test_indices_of_other_dtypes(dtype):
    ours, theirs = (module.Embedding(5, 3, key=KEY) for module in (nn, eqx.nn))
    x = jnp.asarray([0, 4, 100], dtype)
    np.testing.assert_array_equal(jax.vmap(ours)(x), jax.vmap(theirs)(x))


@pytest.mark.wrong_types
@pytest.mark.parametrize("x", [True, 1.0, [1], "1", None, jnp.float32(1), jnp.ones(2, jnp.int32)], ids=str)
def test_what_equinox_refuses(x):
    """Or takes, as it does `True`, which adds an axis."""
    ours, theirs = (module.Embedding(5, 3, key=KEY) for module in (nn, eqx.nn))
    results = []
    for layer in (ours, theirs):
        try:
            results.append(layer(x))
        except Exception as error:
            results.append((type(error), str(error)))
    got, want = results
    assert np.array_equal(got, want) if eqx.is_array(want) else got == want


def test_tables_of_integers():
    table = jnp.arange(6).reshape(3, 2)
    np.testing.assert_array_equal(nn.Embedding(weight=table)(jnp.array(-1)), [4, 5])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_a_table_are_summed_in_f32(dtype):
    """One that many tokens share. Summed in bf16, a thousand ones are 256."""
    layer = nn.Embedding(4, 2, dtype=dtype, key=KEY)
    tokens = jnp.full(4000, 1)

    def loss(layer):
        return jax.vmap(layer)(tokens).astype(jnp.float32).sum()

    gradient = jax.grad(loss)(layer).weight
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(gradient.astype(jnp.float32), [[0, 0], [4000, 4000], [0, 0], [0, 0]])


def test_vmap_is_one_gather():
    text = jax.jit(jax.vmap(nn.Embedding(5, 3, key=KEY))).lower(jnp.zeros(7, jnp.int32)).as_text()
    assert text.count('"stablehlo.gather"') == 1
    assert "while" not in text
