"""Class weights, and a target for every class, against plain formulas and PyTorch's published semantics."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import ops

from .. import table
from ..table import normal
from .test_loss import examples, logits_of


pytestmark = pytest.mark.any_jax_version

OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"ignore_index": 3},
    {"label_smoothing": 0.2, "z_loss": 0.1, "ignore_index": -1},
]
by_options = pytest.mark.parametrize("options", OPTIONS, ids=str)


def formula(z, targets, z_loss=0.0):
    lse = jnp.log(jnp.exp(z).sum(-1, keepdims=True))
    return (targets * (lse - z)).sum(-1) + z_loss * lse[..., 0] ** 2


def of_labels(z, labels, weights, *, label_smoothing=0.0, z_loss=0.0, ignore_index=None):
    one_hot = jax.nn.one_hot(labels % z.shape[-1], z.shape[-1], dtype=z.dtype)
    loss = formula(
        z,
        jnp.broadcast_to(weights, z.shape) * ((1 - label_smoothing) * one_hot + label_smoothing / z.shape[-1]),
        z_loss,
    )
    return loss if ignore_index is None else jnp.where(labels == ignore_index, 0.0, loss)


def derivatives(f, *args):
    """The value, the gradient of each operand, and a second derivative."""

    def scalar(*args):
        loss = f(*args)
        return jnp.vdot(loss, jnp.arange(1.0, loss.size + 1).reshape(loss.shape).astype(loss.dtype))

    gradient = jax.grad(scalar, tuple(range(len(args))))
    square = lambda *args: sum(jnp.sum(jnp.sin(g)) for g in gradient(*args))
    return table.quickly_compiled(lambda *args: (f(*args), gradient(*args), jax.grad(square)(*args)))(*args)


def same(got, want, rtol):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=rtol, atol=rtol), got, want)


@by_options
def test_class_weights_of_logits(options, x64):
    x, weight, labels = examples(dtype=np.float64)
    z, weights = np.asarray(logits_of(x, weight)), np.abs(normal(3, (7,), np.float64))
    got = derivatives(lambda z, w: ops.softmax_cross_entropy(z, labels, class_weights=w, **options), z, weights)
    same(got, derivatives(lambda z, w: of_labels(z, labels, w, **options), z, weights), 1e-10)


@by_options
@pytest.mark.parametrize("size", [7, 521])  # one chunk; several, and a rest
def test_class_weights_of_a_linear_layer(size, options, x64):
    x, weight, labels = examples(size=size, dtype=np.float64)
    weights = np.abs(normal(3, (size,), np.float64))

    def ours(x, weight, weights):
        return ops.linear_cross_entropy(x, weight, labels, class_weights=weights, **options)

    want = derivatives(lambda x, weight, w: of_labels(logits_of(x, weight), labels, w, **options), x, weight, weights)
    same(derivatives(ours, x, weight, weights), want, 1e-9)


@by_options
def test_class_weights_in_python(options):
    x, weight, labels = examples(size=1030)
    f = functools.partial(ops.linear_cross_entropy, class_weights=np.abs(normal(3, (1030,))), **options)
    got, want = (f(x, weight, labels, implementation=kind) for kind in ("python", "reference"))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", table.DTYPES, ids=str)
def test_class_weights_run_the_kernel(dtype):
    logits, labels, weights = normal(1, (5, 300), dtype, 3.0), np.array([1, -1, 299, 0, 7], np.int32), normal(2, (300,))
    loss = functools.partial(ops.softmax_cross_entropy, class_weights=weights)
    assert [call.lane for call in eqxc.inspect(loss, logits, labels).calls] == ["native"]
    got = jax.jit(loss)(logits, labels)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, of_labels(np.asarray(logits, np.float32), labels, weights), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("loss", [ops.softmax_cross_entropy, None], ids=["softmax", "linear"])
def test_labels_that_are_no_class(loss, options):
    """An ignored one has no part in any gradient, whatever is in its row; another one is NaN."""
    rows, weights = (
        np.array([[1.0, 2.0, 3.0], [np.nan, np.inf, 0.0], [0.0, 1.0, 0.0]], np.float32),
        np.ones(3, np.float32),
    )
    labels = np.array([2, -100, 3], np.int32)

    def f(rows, weights):
        more = {"class_weights": weights, "ignore_index": -100, **options}
        if loss is not None:
            return loss(rows, labels, **more)
        return ops.linear_cross_entropy(rows, jnp.eye(3), labels, **more)

    got = f(rows, weights)
    assert np.isfinite(got[0])
    assert got[1] == 0
    assert np.isnan(got[2])
    rows, weights = jax.grad(lambda *args: f(*args)[:2].sum(), (0, 1))(rows, weights)
    assert np.isfinite(weights).all()
    np.testing.assert_array_equal(rows[1], 0)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_targets(options, x64):
    logits, weights = normal(1, (2, 3, 7), np.float64), np.abs(normal(3, (7,), np.float64))
    targets = np.array(jax.nn.softmax(normal(2, (2, 3, 7), np.float64)))
    targets[0, :, 2] = 0  # which has a derivative nevertheless

    def ours(logits, targets, weights):
        return ops.softmax_cross_entropy(logits, targets, class_weights=weights, **options)

    def plain(logits, targets, weights):
        smoothing = options.get("label_smoothing", 0.0)
        targets = jnp.broadcast_to(weights, logits.shape) * ((1 - smoothing) * targets + smoothing / 7)
        return formula(logits, targets, options.get("z_loss", 0.0))

    args = (logits, targets, weights)
    same(derivatives(ours, *args), derivatives(plain, *args), 1e-10)


def test_targets_of_one_class_are_a_label():
    logits, labels = normal(1, (5, 7), np.float32, 3.0), np.arange(5, dtype=np.int32)
    hard = functools.partial(ops.softmax_cross_entropy, logits, label_smoothing=0.1, z_loss=0.01)
    np.testing.assert_allclose(hard(jax.nn.one_hot(labels, 7)), hard(labels), rtol=1e-6)
    rows = jax.vmap(eqxc.nn.SoftmaxCrossEntropy(label_smoothing=0.1, z_loss=0.01))(logits, jax.nn.one_hot(labels, 7))
    np.testing.assert_allclose(rows, hard(labels), rtol=1e-6)


def test_a_hidden_class_without_a_target():
    logits, targets = np.array([0.0, -np.inf, 1.0], np.float32), np.array([0.5, 0.0, 0.5], np.float32)
    loss, gradient = jax.value_and_grad(ops.softmax_cross_entropy)(logits, targets)
    np.testing.assert_allclose(loss, np.log(1 + np.e) - 0.5, rtol=1e-6)
    np.testing.assert_allclose(gradient, [1 / (1 + np.e) - 0.5, 0, np.e / (1 + np.e) - 0.5], atol=1e-6)
    of_targets = jax.grad(ops.softmax_cross_entropy, 1)(logits, targets)
    np.testing.assert_allclose(of_targets, [np.log(1 + np.e), 0, np.log(1 + np.e) - 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (np.ones((2, 3), np.float32), {}, r"expected targets of the shape of logits"),
        (np.ones((2, 7), np.float32), {"ignore_index": 1}, r"expected no ignore_index with targets; got 1\."),
        (np.ones(2, np.int32), {"class_weights": np.ones(3, np.float32)}, r"expected class_weights of shape \(7,\)"),
        (
            np.ones(2, np.int32),
            {"class_weights": np.ones(7, np.int32)},
            r"class_weights of shape \(7,\) and a floating",
        ),
        (np.ones((2, 7), np.float32), {"implementation": "native"}, r"native"),
    ],
    ids=str,
)
def test_wrong_calls(labels, options, message):
    with pytest.raises(ValueError, match=message):
        ops.softmax_cross_entropy(jnp.ones((2, 7)), labels, **options)
