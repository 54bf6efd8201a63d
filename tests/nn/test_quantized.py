"""Weights of a few bits: made of floats, multiplied, and differentiated."""

import functools
from typing import Any

import equinox as eqx
import gguf
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

import eqxcallback as eqxc
from eqxcallback import nn, ops
from eqxcallback.ops.linear import _reference_activations as reference_activations

from . import naive


KEY = jax.random.key(0)
BITS: list[dict[str, Any]] = [{}, {"bits": 8}, {"bits": 4}, {"encoding": "int8"}, {"bits": 8, "encoding": "int8"}]
# Of a weight: half a step, and what is lost where scale and minimum are rounded to f16.
STEPS = {"Q8_0": 1 / 127, "int8": 1 / 127, "Q4_1": 1 / 15}


def normal(seed, *shape, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(naive.normal(seed, *shape, dtype=dtype))


def weights(layer):
    return layer.rows(jnp.arange(layer.out_features))


def largest_errors(weight, encoding):
    """For each weight."""
    weight = np.asarray(weight, np.float64)
    parts = weight[..., None, :] if encoding == "int8" else weight.reshape(*weight.shape[:-1], -1, 32)
    low, high = parts.min(-1, keepdims=True), parts.max(-1, keepdims=True)
    largest = np.maximum(np.abs(low), np.abs(high))
    extent = high - low if encoding == "Q4_1" else largest
    lost = 0 if encoding == "int8" else 2.0**-10 * (largest + extent) + 2.0**-24 * 127  # those below f16 are subnormal
    return np.broadcast_to(extent * STEPS[encoding] / 2 * (1 + 1e-5) + lost, parts.shape).reshape(weight.shape)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("implementation", ["auto", "reference", "python"])
@pytest.mark.parametrize("bits", BITS, ids=str)
def test_from_linear(bits, implementation, dtype):
    linear = eqx.nn.Linear(64, 5, key=KEY, dtype=dtype)
    layer = nn.QuantizedLinear.from_linear(linear, **bits, implementation=implementation)
    assert (layer.in_features, layer.out_features, layer.bias is linear.bias) == (64, 5, True)
    assert layer.encoding == bits.get("encoding", "Q4_1" if bits.get("bits") == 4 else "Q8_0")
    assert (
        np.abs(weights(layer) - linear.weight.astype(jnp.float32)) <= largest_errors(linear.weight, layer.encoding)
    ).all()
    x = normal(1, 4, 64, dtype=dtype)
    got = jax.vmap(layer)(x)
    assert (got.dtype, got.shape) == (dtype, (4, 5))
    assert linear.bias is not None
    want = x.astype(jnp.float32) @ weights(layer).T + linear.bias.astype(jnp.float32)[None]
    tolerance = {jnp.float32: 1e-5, jnp.bfloat16: 2.0**-6, jnp.float16: 2.0**-9}[dtype]
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=tolerance, atol=tolerance)


def test_any_number_of_features_as_int8():
    layer = nn.QuantizedLinear.from_linear(eqx.nn.Linear(7, 3, use_bias=False, key=KEY), encoding="int8")
    assert (layer.in_features, layer.out_features, layer.bias) == (7, 3, None)
    assert (layer.blocks.dtype, layer.blocks.shape) == (jnp.int8, (3, 7))
    np.testing.assert_allclose(layer(jnp.ones(7)), weights(layer).sum(-1), rtol=1e-6)


@pytest.mark.parametrize("implementation", ["auto", "reference", "python"])
@pytest.mark.parametrize("bits", BITS[2:4], ids=str)
def test_quantized_activations(bits, implementation):
    """The layer's activations are those of the op: a row, or blocks of 32, of 255 levels."""
    linear = eqx.nn.Linear(64, 5, use_bias=False, key=KEY)
    make = functools.partial(nn.QuantizedLinear.from_linear, linear, **bits, implementation=implementation)
    exact, layer = make(), make(activations="int8")
    x = normal(1, 4, 64)
    rounded = reference_activations.quantize_activations(x, 64 if "encoding" in bits else 32)
    got = jax.vmap(layer)(x)
    np.testing.assert_allclose(got, jax.vmap(exact)(rounded), rtol=1e-5, atol=1e-5)
    assert not np.allclose(got, jax.vmap(exact)(x), rtol=1e-5, atol=1e-5)


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(
    strategies.sampled_from(["Q4_1", "Q8_0", "int8"]), strategies.integers(-8, 3), strategies.integers(0, 2**32 - 1)
)
def test_errors_are_half_a_step(encoding, exponent, seed):
    """The weights have any size, and some rows are of one value."""
    rng = np.random.default_rng(seed)
    weight = (10.0**exponent * (rng.standard_normal((4, 64)) + rng.uniform(-3, 3))).astype(np.float32)
    weight[0], weight[1] = weight[0, 0], 0
    if encoding == "int8":
        blocks, scale = ops.quantize_int8(weight)
        got = blocks.astype(jnp.float32) * scale[:, None]
    else:
        got = ops.dequantize(ops.quantize(jnp.asarray(weight), encoding=encoding), encoding=encoding)  # pyright: ignore[reportArgumentType]
    assert (np.abs(np.asarray(got) - weight) <= largest_errors(weight, encoding)).all()
    assert (np.asarray(got[1]) == 0).all()


@pytest.mark.parametrize("encoding", ["Q4_1", "Q8_0"])
def test_blocks_are_gguf(encoding):
    """The package `gguf` reads the blocks, and makes the same of the same weights, but for roundings."""
    kind = gguf.GGMLQuantizationType[encoding]
    weight = np.asarray(normal(1, 3, 64))
    blocks: Any = np.asarray(ops.quantize(jnp.asarray(weight), encoding=encoding))
    theirs = gguf.quants.quantize(weight, kind)
    assert blocks.shape == theirs.shape
    np.testing.assert_allclose(
        gguf.quants.dequantize(blocks, kind), ops.dequantize(blocks, encoding=encoding), rtol=1e-6
    )
    step = 2 * largest_errors(weight, encoding)
    assert (np.abs(gguf.quants.dequantize(theirs, kind) - gguf.quants.dequantize(blocks, kind)) <= step).all()


@pytest.mark.parametrize("bits", [{"bits": 8}, {"bits": 4}, {"encoding": "int8"}], ids=str)
def test_gradients(bits):
    """To the input, as of the weights in floats; to the bias and the scale; blocks have none."""
    layer = nn.QuantizedLinear.from_linear(eqx.nn.Linear(64, 5, key=KEY), **bits)
    x, dense = normal(1, 4, 64), weights(layer)
    got = jax.grad(lambda x: jnp.sin(jax.vmap(layer)(x)).sum())(x)
    assert layer.bias is not None
    bias = layer.bias
    want = jax.grad(lambda x: jnp.sin(x @ dense.T + bias[None]).sum())(x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    gradients = eqx.filter_grad(lambda layer: jax.vmap(layer)(x).sum())(layer)
    assert gradients.blocks is None
    np.testing.assert_allclose(gradients.bias, 4.0)
    if layer.scale is not None:
        np.testing.assert_allclose(
            gradients.scale, (x @ layer.blocks.astype(jnp.float32).T).sum(0), rtol=1e-4, atol=1e-3
        )


def test_a_batch_is_one_call():
    cases: Any = (
        ({"bits": 8}, ("float32[4,64]", "uint8[5,68]")),
        ({"encoding": "int8"}, ("float32[4,64]", "int8[5,64]", "float32[5]")),
    )
    for bits, operands in cases:
        layer = nn.QuantizedLinear.from_linear(eqx.nn.Linear(64, 5, key=KEY), **bits, implementation="python")
        (call,) = eqxc.inspect(jax.vmap(layer), jnp.ones((4, 64))).calls
        assert (call.lane, call.times, call.operands) == ("python", 1, operands)


def test_saved_and_loaded(tmp_path):
    for bits in BITS[2:4]:
        first, second = (
            nn.QuantizedLinear.from_linear(eqx.nn.Linear(32, 5, key=jax.random.key(i)), **bits) for i in range(2)
        )
        eqx.tree_serialise_leaves(tmp_path / "layer", first)
        read = eqx.tree_deserialise_leaves(tmp_path / "layer", second)
        jax.tree.map(np.testing.assert_array_equal, read, first)


@pytest.mark.parametrize("encoding", ["Q4_1", "int8"])
def test_check(encoding):
    skip = ("threads", "sharded jit", "shard_map", "export", "odd shapes", "stateless", "determinism", "nested vmap")
    linear = eqx.nn.Linear(32, 5, key=KEY)
    layer = nn.QuantizedLinear.from_linear(linear, encoding=encoding, implementation="python")
    assert eqxc.testing.check(layer, normal(1, 32), skip=skip).passed


LINEAR = eqx.nn.Linear(33, 5, key=KEY)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: nn.QuantizedLinear.from_linear(LINEAR),
            r"from_linear: expected in_features to be a multiple of 32 for Q8_0; got 33\. Use encoding=\"int8\", which takes",
        ),
        (lambda: nn.QuantizedLinear.from_linear(LINEAR, 4), r"a multiple of 32 for Q4_1; got 33"),
        (lambda: nn.QuantizedLinear.from_linear(LINEAR, 5), r"from_linear: expected bits to be 4 or 8; got 5"),
        (
            lambda: nn.QuantizedLinear.from_linear(LINEAR, 4, "int8"),
            r"from_linear: expected bits=8 for encoding='int8'; got bits=4\. Either of them is enough",
        ),
        (
            lambda: nn.QuantizedLinear.from_linear(LINEAR, encoding="F16"),  # pyright: ignore[reportArgumentType]
            r"QuantizedLinear.from_linear: expected encoding to be one of Q4_1, Q8_0, int8; got 'F16'",
        ),
        (
            lambda: nn.QuantizedLinear.from_linear(eqx.nn.Linear("scalar", 3, key=KEY)),
            r"from_linear: expected a layer of numbers of features; got in_features='scalar', out_features=3",
        ),
        (
            lambda: nn.QuantizedLinear(jnp.zeros((3, 5), jnp.int8), "int8"),
            r"QuantizedLinear: expected a scale of shape \(out_features,\) for encoding 'int8'; got scale=None",
        ),
        (
            lambda: nn.QuantizedLinear(jnp.zeros((3, 34), jnp.uint8), "Q8_0", jnp.ones(3)),
            r"QuantizedLinear: expected no scale: blocks have their own for encoding 'Q8_0'",
        ),
        (
            lambda: nn.QuantizedLinear(np.zeros((3, 40), np.uint8), "Q8_0"),  # pyright: ignore[reportArgumentType]
            r"QuantizedLinear: expected uint8 blocks of shape \(out_features, bytes\), bytes a multiple of 34 \(Q8_0\); "
            r"got blocks: uint8\[3,40\]",
        ),
        (
            lambda: nn.QuantizedLinear(jnp.zeros((3, 34)), "Q8_0"),
            r"expected uint8 blocks .*; got blocks: float32\[3,34\]",
        ),
        (
            lambda: nn.QuantizedLinear(jnp.zeros(20, jnp.uint8), "Q4_1"),
            r"bytes a multiple of 20 .*; got blocks: uint8\[20\]",
        ),
        (
            lambda: nn.QuantizedLinear(jax.ShapeDtypeStruct((3, 40), jnp.uint8), "Q8_0"),  # pyright: ignore[reportArgumentType]
            r"bytes a multiple of 34 \(Q8_0\); got blocks: uint8\[3,40\]",
        ),
        (
            lambda: nn.QuantizedLinear(jnp.zeros((3, 5), jnp.uint8), "int8", jnp.ones(3)),
            r"QuantizedLinear: expected int8 blocks of shape \(out_features, in_features\) \(int8\); got blocks: uint8",
        ),
        (
            lambda: nn.QuantizedLinear(jnp.zeros((3, 5), jnp.int8), "int8", jnp.ones(5)),
            r"QuantizedLinear: expected scale of shape \(out_features,\), \(3,\); got scale: float32\[5\], blocks: int8\[3,5\]",
        ),
        (
            lambda: nn.QuantizedLinear(jnp.zeros((6, 34), jnp.uint8), "Q8_0", None, jnp.ones((6, 1))),
            r"QuantizedLinear: expected bias of shape \(out_features,\), \(6,\); got bias: float32\[6,1\], blocks: uint8",
        ),
        (
            lambda: nn.QuantizedLinear.from_linear(eqx.tree_at(lambda x: x.weight, LINEAR, jnp.full((5, 32), 1e7))),
            r"quantize: expected weight of magnitudes up to 8319008 \(Q8_0\)",
        ),
        (
            lambda: ops.int8_linear(jnp.ones(5), jnp.zeros((3, 5), jnp.uint8), jnp.ones(3)),
            r"int8_linear: expected weight in int8, of shape \(out_features, in_features\) for the last axis of x; got",
        ),
        (
            lambda: ops.int8_linear(jnp.ones(5), jnp.zeros((3, 5), jnp.int8), jnp.ones(5)),
            r"int8_linear: expected scale of shape \(out_features,\); got scale: float32\[5\]",
        ),
        (
            lambda: ops.quantize(jnp.ones(33), encoding="Q8_0"),
            r"quantize: expected weight with a multiple of 32 features \(Q8_0\); got weight: float32\[33\]",
        ),
        (
            lambda: ops.quantize_int8(jnp.ones(3)),
            r"quantize_int8: expected weight of shape \(out_features, in_features\)",
        ),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("layer", [3, eqx.nn.Conv1d(2, 3, 1, key=KEY)], ids=["number", "convolution"])
def test_made_of_what_is_not_a_linear_layer(layer):
    kind = type(layer).__name__
    with pytest.raises(TypeError, match=rf"Linear\.from_linear: expected an equinox\.nn\.Linear; got {kind}\."):
        nn.QuantizedLinear.from_linear(layer)


def test_made_of_what_are_not_arrays():
    numbers: Any = [0.0, 1.0, 2.0]
    with pytest.raises(TypeError, match=r"QuantizedLinear: expected blocks to be an array; got list\. `jnp\.asarray`"):
        nn.QuantizedLinear(numbers, "Q8_0")
    with pytest.raises(TypeError, match=r"QuantizedLinear: expected bias to be an array; got list\."):
        nn.QuantizedLinear(jnp.zeros((3, 34), jnp.uint8), "Q8_0", None, numbers)


@pytest.mark.parametrize("bits", [{"bits": 8}, {"encoding": "int8"}], ids=str)
def test_stacked_layers(bits):
    """Constructors see shapes of traced arrays, and some of many layers at once."""
    make = lambda key: nn.QuantizedLinear.from_linear(eqx.nn.Linear(32, 5, key=key), **bits)
    keys = jax.random.split(KEY, 3)
    stacked = eqx.filter_vmap(make)(keys)
    assert stacked.blocks.shape == (3, *make(KEY).blocks.shape)
    again = nn.QuantizedLinear(stacked.blocks, stacked.encoding, stacked.scale, stacked.bias)
    assert jax.tree.structure(again) == jax.tree.structure(stacked)
    x = normal(1, 32)
    got = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(eqx.if_array(0), None))(stacked, x)
    np.testing.assert_allclose(got[1], make(keys[1])(x), rtol=1e-5, atol=1e-6)


@pytest.mark.wrong_types  # shapes in place of arrays
@pytest.mark.parametrize("bits", [{"bits": 8}, {"encoding": "int8"}], ids=str)
def test_abstract_layers(bits):
    layer = eqx.filter_eval_shape(
        lambda key: nn.QuantizedLinear.from_linear(eqx.nn.Linear(32, 5, key=key), **bits), KEY
    )
    again = nn.QuantizedLinear(layer.blocks, layer.encoding, layer.scale, layer.bias)
    assert jax.tree.structure(again) == jax.tree.structure(layer)
