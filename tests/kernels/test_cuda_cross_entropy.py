"""Cross-entropy, forward and backward, on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from . import kernels
from .checking import SEEDS, check, normal, want, want_gradients
from .kernels import DTYPES, F32, results


# Less than a pack, odd, one warp and several warps a row, and the vocabulary of GPT-2.
SHAPES = [(1, 1), (5, 7), (9, 264), (3, 1001), (2, 50_257)]
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def reference(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)[:, 0]


def of_logits(logits, labels):
    return lambda cotangent: want_gradients(reference, cotangent, logits, labels)[0]


def example(shape, dtype, scale=3.0):
    rows, size = shape
    return normal(1, shape, dtype, scale), np.random.default_rng(2).integers(0, size, rows).astype(np.int32)


@by_shape
def test_forward(shape):
    for dtype in DTYPES:
        logits, labels = example(shape, dtype)
        check(results(kernels.cross_entropy(logits, labels))[0], want(reference, logits, labels), shape[1])


@by_shape
def test_backward(shape):
    for dtype in DTYPES:
        logits, labels = example(shape, dtype)
        loss, dloss = want(reference, logits, labels), normal(3, shape[:1])
        got, _ = results(kernels.cross_entropy_backward(logits, labels, loss, dloss), seed=2)
        check(got, of_logits(logits, labels)(dloss), 1)


def test_any_alignment():
    for dtype in DTYPES:
        logits, labels = example((9, 264), dtype)
        loss, dloss = want(reference, logits, labels), normal(3, (9,))
        check(results(kernels.cross_entropy(logits, labels), misaligned=True)[0], loss, 264)
        call = kernels.cross_entropy_backward(logits, labels, loss, dloss)
        check(results(call, misaligned=True)[0], of_logits(logits, labels)(dloss), 1)


def test_the_order_of_threads_does_not_matter():
    call = kernels.cross_entropy(*example((5, 1001), F32))
    assert len({results(call, seed)[0].tobytes() for seed in SEEDS}) == 1


def test_no_rows():
    logits, labels = example((0, 7), F32)
    assert results(kernels.cross_entropy(logits, labels))[0].shape == (0,)


@pytest.mark.parametrize("size", [40, 1030])
def test_values_at_the_edges(size):
    """One row each: large, all of them large, masked, all masked, the label masked, inf, NaN; labels from the end and outside."""
    logits, labels = example((10, size), F32)
    logits[0, 7], labels[0] = 1e4, 7
    logits[1] = 1e4 + np.arange(size) / 16
    logits[2, 5:], labels[2] = -np.inf, 3
    logits[3] = -np.inf
    logits[4, 9], labels[4] = -np.inf, 9
    logits[5, 2], logits[6, 4] = np.inf, np.nan
    labels[7:] = -1, size, -size - 1
    loss = want(reference, logits, labels)
    assert np.isnan(loss[[3, 5, 6, 8, 9]]).all()
    (got,) = results(kernels.cross_entropy(logits, labels))
    check(got, loss, size)
    dloss = normal(3, (10,))
    gradient = of_logits(logits, labels)(dloss)
    check(results(kernels.cross_entropy_backward(logits, labels, got, dloss))[0], gradient, 1)


def test_a_very_unlikely_label():
    """The loss is too large to find the probabilities from it."""
    logits, labels = example((3, 264), F32)
    logits[1, 5], labels[1] = -3e4, 5
    loss, dloss = want(reference, logits, labels), np.ones(3, np.float32)
    got, _ = results(kernels.cross_entropy_backward(logits, labels, loss, dloss))
    check(got, of_logits(logits, labels)(dloss), 1)
