"""Cross-entropy, forward and backward, on a CPU."""

from typing import Any

import numpy as np
import pytest

from eqxcallback.ops.loss._reference import softmax_cross_entropy as reference
from eqxcallback.ops.loss._reference_targets import cross_entropy_of_targets

from ..ops.loss.cases import softmax_cross_entropy
from ..ops.table import DTYPES, normal, with_options
from . import kernels
from .checking import ROWS, SEEDS, check, want, want_gradients
from .kernels import BF16, F32, results


by_row = pytest.mark.parametrize("row", ROWS["softmax_cross_entropy"], ids=str)


def example(shape, dtype, *more) -> Any:
    return softmax_cross_entropy(dtype, shape, *more).args


def options_of(row):
    _, options, *_ = (*row.arguments, None)
    return options or {}


SMOOTH = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": -2}


def check_gradients(got, expected, needed=kernels.ALL):
    """Check the gradients of the logits, and of targets."""
    for i, (gradient, exact) in enumerate(zip(got, expected, strict=True)):
        if gradient is not None:
            check(gradient, exact, 1)
        assert (gradient is None) == (i not in needed or exact.dtype != F32)


@by_row
def test_forward(row):
    for dtype in DTYPES:
        case, expected = row.wanted(dtype)
        check(results(kernels.cross_entropy(*case.args, **options_of(row)))[0], expected, case.terms)


@by_row
def test_backward(row):
    for dtype in DTYPES:
        case, loss = row.wanted(dtype)
        (logits, labels), dloss = case.args, normal(3, loss.shape)
        got = results(kernels.cross_entropy_backward(logits, labels, loss, dloss, **options_of(row)), seed=2)
        check_gradients(got, want_gradients(case.reference, dloss, *case.args))


@pytest.mark.parametrize("needed", [[0], [1]], ids=str)
def test_gradients_of_targets_that_are_not_needed(needed):
    (logits, targets), dloss = example((3, 41), F32, {}, True), normal(3, (3,))
    nothing = np.full(3, np.nan, np.float32)  # the loss is not read
    expected = want_gradients(cross_entropy_of_targets, dloss, logits, targets)
    for options in ({}, {"misaligned": True}):
        got = results(kernels.cross_entropy_backward(logits, targets, nothing, dloss, needed=needed), **options)
        check_gradients(got, expected, needed)


def test_any_alignment():
    for dtype in DTYPES:
        for options, targets in (({}, False), (SMOOTH, False), ({}, True)):
            case, dloss = softmax_cross_entropy(dtype, (9, 264), options, targets), normal(3, (9,))
            (logits, labels), loss = case.args, case.want()
            check(results(kernels.cross_entropy(logits, labels, **options), misaligned=True)[0], loss, 264)
            call = kernels.cross_entropy_backward(logits, labels, loss, dloss, **options)
            check_gradients(results(call, misaligned=True), want_gradients(case.reference, dloss, *case.args))


def test_the_order_of_threads_does_not_matter():
    for options, targets in (({}, False), (SMOOTH, False), ({}, True)):
        call = kernels.cross_entropy(*example((5, 1001), F32, {}, targets), **options)
        assert len({results(call, seed)[0].tobytes() for seed in SEEDS}) == 1


def test_no_rows():
    for targets in (False, True):
        assert results(kernels.cross_entropy(*example((0, 7), F32, {}, targets)))[0].shape == (0,)


def test_no_classes():
    """No label is one of them, and without targets there is no loss but that of the sum."""
    logits, labels, targets = np.zeros((3, 0), np.float32), np.zeros(3, np.int32), np.zeros((3, 0), np.float32)
    for options in ({}, SMOOTH):
        np.testing.assert_array_equal(results(kernels.cross_entropy(logits, labels, **options))[0], np.nan)
    np.testing.assert_array_equal(results(kernels.cross_entropy(logits, targets))[0], 0)
    np.testing.assert_array_equal(results(kernels.cross_entropy(logits, targets, z_loss=0.1))[0], np.inf)


OPTIONS = [{}, *({name: value} for name, value in SMOOTH.items()), SMOOTH, {"label_smoothing": 1.0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [40, 1030])
def test_values_at_the_edges(size, options):
    """One row each: large, all of them large, masked, all masked, the label masked, inf, NaN; labels from the end and outside."""
    logits, labels = example((10, size), F32)
    logits[0, 7], labels[0] = 1e4, 7
    logits[1] = 1e4 + np.arange(size) / 16
    logits[2, 5:], labels[2] = -np.inf, 3
    logits[3] = -np.inf
    logits[4, 9], labels[4] = -np.inf, 9
    logits[5, 2], logits[6, 4] = np.inf, np.nan
    labels[7:] = -1, size, -size - 1
    definition = with_options(reference, **options)
    loss = want(definition, logits, labels)
    assert np.isnan(loss[[3, 5, 6, 8, 9]]).all()
    (got,) = results(kernels.cross_entropy(logits, labels, **options))
    check(got, loss, size)
    dloss = normal(3, (10,))
    gradient, _ = want_gradients(definition, dloss, logits, labels)
    check(results(kernels.cross_entropy_backward(logits, labels, got, dloss, **options))[0], gradient, 1)


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.01}], ids=str)
def test_targets_at_the_edges(options):
    """One row each: large; hidden with and without a target; all hidden; inf; NaN; a target that is NaN; none, of any logits."""
    logits, targets = example((11, 40), F32, {}, True)
    logits[0] = 1e4 + np.arange(40) / 16
    logits[1, 5:], targets[1, 5:] = -np.inf, 0
    logits[2, 5], targets[2, 5] = -np.inf, 0.5
    logits[3] = -np.inf
    logits[4, 2], logits[5, 4], targets[6, 1] = np.inf, np.nan, np.nan
    targets[7:] = 0
    logits[8, 0], logits[9, 0], logits[10] = np.nan, np.inf, -np.inf
    definition, dloss = with_options(cross_entropy_of_targets, **options), normal(3, (11,))
    loss = want(definition, logits, targets)
    assert np.isfinite(loss[[0, 1, 7]]).all()
    check(results(kernels.cross_entropy(logits, targets, **options))[0], loss, 40)
    got = results(kernels.cross_entropy_backward(logits, targets, loss, dloss, **options))
    check_gradients(got, want_gradients(definition, dloss, logits, targets))


def test_ignored_rows_may_be_anything():
    """Neither the label nor the logits of a row count that is ignored."""
    logits, labels = example((4, 40), BF16)
    logits[0], logits[1], labels[:3] = np.nan, np.inf, -100
    options, dloss = {"ignore_index": -100}, np.ones(4, np.float32)
    (loss,) = results(kernels.cross_entropy(logits, labels, **options))
    np.testing.assert_array_equal(loss[:3], 0)
    gradient = results(kernels.cross_entropy_backward(logits, labels, loss, dloss, **options))[0]
    np.testing.assert_array_equal(gradient[:3].astype(np.float32), 0)
    assert np.all(gradient[3].astype(np.float32))


def test_a_very_unlikely_label():
    """The loss is too large to find the probabilities from it."""
    logits, labels = example((3, 264), F32)
    logits[1, 5], labels[1] = -3e4, 5
    loss, dloss = want(reference, logits, labels), np.ones(3, np.float32)
    got, _ = results(kernels.cross_entropy_backward(logits, labels, loss, dloss))
    check(got, want_gradients(reference, dloss, logits, labels)[0], 1)
