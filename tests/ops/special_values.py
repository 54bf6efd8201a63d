"""Operands that are special, and results that may be."""

from typing import Any

import numpy as np

from . import table


# The smallest normal number: results below it may be zero, for XLA flushes them on some threads.
TINY = np.finfo(np.float32).tiny


def same(case, got, strict=True, **tolerance: Any):
    """NaN, inf and -inf where the reference has them, and its values elsewhere. If not `strict`, NaN may stand for inf."""
    got, want = np.asarray(got, np.float32), case.want()
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    if strict:
        np.testing.assert_array_equal(got[~finite], want[~finite])
    np.testing.assert_allclose(got[finite], want[finite], **tolerance)


def fitting(value, dtype):
    """The finite number next to `value`."""
    return float(np.clip(value, -65504, 65504)) if dtype == np.float16 else value


def replaced(case, operand, index, value):
    args = [np.array(x) for x in case.args]
    args[operand][index] = value
    return table.Case(case.op, case.reference, tuple(args), case.terms)
