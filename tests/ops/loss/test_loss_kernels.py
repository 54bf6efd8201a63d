"""The kernels of the losses: options, labels that are none, logits of any size."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops
from eqxcallback.ops.loss import _reference as loss_reference

from .. import table
from ..gradients import gradients
from ..table import DTYPES, normal
from . import cases


pytestmark = pytest.mark.any_jax_version


OPTIONS = [{"label_smoothing": 0.1}, {"z_loss": 0.01}, {"ignore_index": 3}, {"ignore_index": -1, "z_loss": 0.1}]


@pytest.mark.parametrize("options", [*OPTIONS, {"label_smoothing": 1.0, "z_loss": 0.2, "ignore_index": 0}], ids=str)
@pytest.mark.parametrize("shape", [(5,), (7, 37), (2, 3, 5000)])
def test_options_of_the_loss(shape, options, isa):
    labels: Any = np.random.default_rng(4).integers(-4, 4, shape[:-1]).astype(np.int32)
    for dtype in DTYPES:
        logits = normal(1, shape, dtype, 3.0)
        wide = logits.astype(np.float32)
        got, want = (
            table.quickly_compiled(table.with_options(f, **options))(x, labels)
            for f, x in ((ops.softmax_cross_entropy, logits), (loss_reference.softmax_cross_entropy, wide))
        )
        assert got.dtype == np.float32
        table.tolerate(got, np.asarray(want), shape[-1])
        got, want = (
            table.quickly_compiled(table.gradients_of_sum(table.with_options(f, **options), 1))(x, labels)
            for f, x in ((ops.softmax_cross_entropy, logits), (loss_reference.softmax_cross_entropy, wide))
        )
        table.tolerate(got[0], np.asarray(want[0]), shape[-1])


def test_labels_that_are_none(isa):
    """Their loss is NaN, and their gradient zero."""
    logits, labels = normal(1, (6, 5), scale=3.0), np.array([5, -6, 4, -1, 2**31 - 1, -(2**31)], np.int32)
    case = cases.softmax_cross_entropy(DTYPES[0], (6, 5))
    np.testing.assert_array_equal(np.isnan(case.op(logits, labels)), [True, True, False, False, True, True])
    got, want = (gradients(f, (logits, labels), np.ones(6, np.float32))[0] for f in (case.op, case.reference))
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert (got[[0, 1, 4, 5]] == 0).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e38, -1e38])
def test_logits_of_any_size(value, isa):
    case = cases.softmax_cross_entropy(DTYPES[0], (4, 37))
    logits, labels = np.array(case.args[0]), np.array([0, 1, 2, -1], np.int32)
    logits[0, 0] = logits[1, 36] = value
    logits[2] = value
    want, got = (np.asarray(f(jnp.asarray(logits), jnp.asarray(labels))) for f in (case.reference, case.op))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("base", [300.0, 2.0**20 - 2, 2 - 2.0**20, 2.0**22, -(2.0**22)])
def test_logits_far_from_zero(base, isa):
    """Nothing is rounded when the base is added, so that nothing changes but the base itself."""
    logits = np.random.default_rng(5).integers(-8, 9, (4, 1000)).astype(np.float32) / 2
    labels = np.array([0, 1, 999, -1], np.int32)
    case = cases.softmax_cross_entropy(DTYPES[0], logits.shape)
    far = logits + np.float32(base)
    assert np.array_equal(far - np.float32(base), logits)
    logits, far, labels = jnp.asarray(logits), jnp.asarray(far), jnp.asarray(labels)
    np.testing.assert_allclose(case.op(far, labels), case.reference(logits, labels), rtol=1e-6)
    got, want = (
        gradients(f, (x, labels), np.ones(4, np.float32))[0] for f, x in ((case.op, far), (case.reference, logits))
    )
    np.testing.assert_allclose(got, want, rtol=3e-6)


def test_what_is_ignored_or_out_of_range():
    logits = jnp.array([[1e4, -np.inf, -1e4], [np.inf, np.nan, 0], [0, 0, 0]])
    for label, ignore in (([1, 5, 3], 5), ([0, -7, -4], -7)):
        got, want = (
            ops.softmax_cross_entropy(logits, np.array(label, np.int32), ignore_index=ignore, implementation=kind)
            for kind in ("python", "reference")
        )
        np.testing.assert_array_equal(got, want)
        assert (float(got[1]), bool(np.isnan(got[2]))) == (0, True)
