"""Cross-entropy, forward and backward, on a CPU."""

import numpy as np
import pytest

from eqxcallback.ops.loss._reference import softmax_cross_entropy as reference

from ..ops.loss.cases import softmax_cross_entropy
from ..ops.table import DTYPES, normal
from . import kernels
from .checking import ROWS, SEEDS, check, want, want_gradients
from .kernels import F32, results


by_row = pytest.mark.parametrize("row", ROWS["softmax_cross_entropy"], ids=str)


def of_logits(logits, labels):
    return lambda cotangent: want_gradients(reference, cotangent, logits, labels)[0]


def example(shape, dtype):
    return softmax_cross_entropy(dtype, shape).args


@by_row
def test_forward(row):
    for dtype in DTYPES:
        case, expected = row.wanted(dtype)
        check(results(kernels.cross_entropy(*case.args))[0], expected, case.terms)


@by_row
def test_backward(row):
    for dtype in DTYPES:
        case, loss = row.wanted(dtype)
        logits, labels = case.args
        dloss = normal(3, loss.shape)
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
