"""The loss layers: what their ops are, one call under `vmap`, and what users see."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import nn, ops

from . import naive


KEY = jax.random.key(0)
OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": -1}
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def normal(seed, *shape, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(naive.normal(seed, *shape, dtype=dtype))


def formula(z, labels, label_smoothing, z_loss, ignore_index):
    lse = jnp.log(jnp.exp(z).sum(-1))
    chosen = jnp.take_along_axis(z, labels[..., None] % z.shape[-1], -1)[..., 0]
    loss = (1 - label_smoothing) * (lse - chosen) + label_smoothing * (lse - z.mean(-1)) + z_loss * lse**2
    return jnp.where(labels == ignore_index, 0.0, loss)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", ["auto", "reference", "python"])
def test_losses_are_the_formula(dtype, implementation):
    labels = jnp.array([2, -1, 0, 6], jnp.int32)
    fused = nn.FusedLinearCrossEntropy(
        5, 7, True, soft_cap=3.0, **OPTIONS, dtype=dtype, key=KEY, implementation=implementation
    )
    x = normal(1, 4, 5, dtype=dtype)
    assert fused.bias is not None
    wide = [np.asarray(array, np.float32) for array in (x, fused.weight, fused.bias)]
    z = 3 * jnp.tanh((wide[0] @ wide[1].T + wide[2][None]) / 3)
    got = jax.vmap(fused)(x, labels)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, formula(z, labels, **OPTIONS), rtol=1e-5, atol=1e-6)
    plain = nn.SoftmaxCrossEntropy(**OPTIONS, implementation=implementation)
    got = jax.vmap(plain)(z.astype(dtype), labels)
    np.testing.assert_allclose(
        got, formula(z.astype(dtype).astype(jnp.float32), labels, **OPTIONS), rtol=1e-5, atol=1e-6
    )


def test_defaults_are_plain_cross_entropy():
    x, labels = normal(1, 4, 5), jnp.array([0, 1, 2, 6])
    fused = nn.FusedLinearCrossEntropy(5, 7, key=KEY)
    assert fused.bias is None
    z = x @ fused.weight.T
    want = -jnp.take_along_axis(jax.nn.log_softmax(z), labels[:, None], -1)[:, 0]
    np.testing.assert_allclose(jax.vmap(fused)(x, labels), want, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(nn.SoftmaxCrossEntropy())(z, labels), want, rtol=1e-5)
    np.testing.assert_allclose(fused(x[0], 0, key=KEY), want[0], rtol=1e-5)
    np.testing.assert_allclose(nn.SoftmaxCrossEntropy()(z[0], 0, key=KEY), want[0], rtol=1e-5)


def test_parameters_are_those_of_a_linear_layer():
    ours, theirs = nn.FusedLinearCrossEntropy(5, 7, True, key=KEY), eqx.nn.Linear(5, 7, True, key=KEY)
    np.testing.assert_array_equal(ours.weight, theirs.weight)
    np.testing.assert_array_equal(ours.bias, theirs.bias)
    for use_bias in (True, False):
        linear = eqx.nn.Linear(5, 7, use_bias, dtype=jnp.bfloat16, key=KEY)
        made = nn.FusedLinearCrossEntropy.from_linear(linear, **OPTIONS, soft_cap=2.0, implementation="reference")
        assert (made.weight is linear.weight, made.bias is linear.bias) == (True, True)
        assert (made.in_features, made.num_classes, made.use_bias) == (5, 7, use_bias)
        assert (made.label_smoothing, made.ignore_index, made.soft_cap) == (0.1, -1, 2.0)
        assert made.implementation == "reference"


def test_weight_shared_with_an_embedding():
    """As Equinox shares: one array, whose gradient is the sum of both uses."""
    pair = (eqx.nn.Embedding(7, 5, key=KEY), nn.FusedLinearCrossEntropy(5, 7, key=KEY))
    shared = eqx.nn.Shared(pair, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight)
    tokens = jnp.array([0, 3, 6])

    def loss(shared):
        embedding, head = shared()
        return jax.vmap(head)(jax.vmap(embedding)(tokens), tokens).sum()

    def want(weight):
        return ops.linear_cross_entropy(weight[tokens], weight, tokens).sum()

    (leaf,) = jax.tree.leaves(eqx.filter(eqx.filter_grad(loss)(shared), eqx.is_array))
    np.testing.assert_allclose(leaf, jax.grad(want)(pair[0].weight), rtol=1e-5, atol=1e-6)


def test_a_batch_is_one_call():
    """One loop over the weight for all examples; in Python, one call of the kernel."""
    x, labels = normal(1, 6, 5), jnp.arange(6)
    layer = nn.FusedLinearCrossEntropy(5, 512, key=KEY)
    text = jax.jit(jax.vmap(layer)).lower(x, labels).as_text()
    assert text.count("stablehlo.while") == 1
    assert "tensor<6x256xf32>" in text  # the logits of a chunk
    for layer, operands in (
        (
            nn.FusedLinearCrossEntropy(5, 7, key=KEY, implementation="python"),
            ("float32[6,5]", "float32[7,5]", "int32[6]"),
        ),
        (nn.SoftmaxCrossEntropy(implementation="python"), ("float32[6,5]", "int32[6]")),
    ):
        (call,) = eqxc.inspect(jax.vmap(layer), x, labels).calls
        assert (call.lane, call.times, call.operands) == ("python", 1, operands)


def test_mixed_dtypes():
    """A weight in f32 and an x in bf16, as in training: where the user lets them be promoted."""
    layer, x = nn.FusedLinearCrossEntropy(5, 7, key=KEY), normal(1, 5, dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_allclose(layer(x, 1), layer(x.astype(jnp.float32), 1))


def test_ignored_batch():
    """The loss is 0, and so is the gradient of every parameter."""
    fused = nn.FusedLinearCrossEntropy(5, 7, True, ignore_index=0, key=KEY)
    x, labels = normal(1, 4, 5), jnp.zeros(4, jnp.int32)
    loss, gradients = eqx.filter_value_and_grad(lambda layer: jax.vmap(layer)(x, labels).sum())(fused)
    assert loss == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("implementation", ["auto", "python"])
def test_check(implementation):
    # What is not the layer's own is left to the checks of ops.
    few = ("types", "reference", "vmap", "grad", "finite differences", "dtypes")
    only = few if implementation == "python" else (*few, "jit", "jvp", "hessian", "scan", "checkpoint", "zero size")
    for layer, x in (
        (nn.SoftmaxCrossEntropy(**OPTIONS, implementation=implementation), normal(1, 7)),
        (nn.FusedLinearCrossEntropy(5, 7, True, **OPTIONS, key=KEY, implementation=implementation), normal(1, 5)),
    ):
        report = eqxc.testing.check(layer, x, jnp.int32(3), only=only)
        assert report.passed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: nn.SoftmaxCrossEntropy(label_smoothing=2.0),
            r"SoftmaxCrossEntropy: expected label_smoothing from 0 to 1; got 2\.0",
        ),
        (
            lambda: nn.FusedLinearCrossEntropy(5, 7, label_smoothing=-0.1, key=KEY),
            r"FusedLinearCrossEntropy: expected label_smoothing from 0 to 1; got -0\.1",
        ),
        (
            lambda: nn.SoftmaxCrossEntropy(label_smoothing="a"),  # pyright: ignore[reportArgumentType]
            r"SoftmaxCrossEntropy: expected label_smoothing from 0 to 1; got 'a'\.",
        ),
        (
            lambda: nn.FusedLinearCrossEntropy(5, 7, z_loss=None, key=KEY),  # pyright: ignore[reportArgumentType]
            r"FusedLinearCrossEntropy: expected z_loss to be a number; got None\.",
        ),
        (
            lambda: nn.SoftmaxCrossEntropy(ignore_index=1.5),  # pyright: ignore[reportArgumentType]
            r"SoftmaxCrossEntropy: expected ignore_index to be an integer or None; got 1\.5\.",
        ),
        (
            lambda: nn.SoftmaxCrossEntropy(ignore_index=True),
            r"SoftmaxCrossEntropy: expected ignore_index to be an integer or None; got True\.",
        ),
        (
            lambda: nn.FusedLinearCrossEntropy(5, 7, ignore_index="1", key=KEY),  # pyright: ignore[reportArgumentType]
            r"FusedLinearCrossEntropy: expected ignore_index to be an integer or None; got '1'\.",
        ),
        (
            lambda: nn.FusedLinearCrossEntropy(5, 7, soft_cap=-1.0, key=KEY),
            r"FusedLinearCrossEntropy: expected soft_cap to be a positive number or None; got -1\.0\.",
        ),
        (
            lambda: nn.SoftmaxCrossEntropy()(jnp.ones((2, 3)), 1),
            r"SoftmaxCrossEntropy: expected logits of shape \(size,\); got \(2, 3\)\. For a batch, use `jax\.vmap\(loss\)",
        ),
        (
            lambda: nn.FusedLinearCrossEntropy(5, 7, key=KEY)(jnp.ones((2, 5)), 1),
            r"FusedLinearCrossEntropy: expected x of shape \(5,\); got \(2, 5\)\. For a batch, use `jax\.vmap\(loss\)",
        ),
        (
            lambda: nn.FusedLinearCrossEntropy(5, 7, key=KEY, implementation="triton")(jnp.ones(5), 1),
            r"linear_cross_entropy: expected implementation to be one that there is a kernel of: .*; got 'triton'",
        ),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_options_of_numpy_are_those_of_python():
    ignored: Any = np.int64(-1)
    layer = nn.SoftmaxCrossEntropy(label_smoothing=np.float64(0.5), z_loss=0, ignore_index=ignored)
    assert layer == nn.SoftmaxCrossEntropy(label_smoothing=0.5, ignore_index=-1)
    assert [type(x) for x in (layer.label_smoothing, layer.z_loss, layer.ignore_index)] == [float, float, int]


@pytest.mark.parametrize("layer", [3, eqx.nn.Conv1d(2, 3, 1, key=KEY)], ids=["number", "convolution"])
def test_made_of_what_is_not_a_linear_layer(layer):
    kind = type(layer).__name__
    with pytest.raises(TypeError, match=rf"Entropy\.from_linear: expected an equinox\.nn\.Linear; got {kind}\."):
        nn.FusedLinearCrossEntropy.from_linear(layer)
