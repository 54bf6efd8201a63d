"""Options of any type of number."""

from typing import Any

import numpy as np

from eqxcallback import ops

from ..zeros import f32


def test_an_ignored_index_of_numpy():
    ignored: Any = np.int64(2)
    logits, labels = f32(2, 3), np.array([1, 2], np.int32)
    np.testing.assert_array_equal(
        ops.softmax_cross_entropy(logits, labels, ignore_index=ignored),
        ops.softmax_cross_entropy(logits, labels, ignore_index=2),
    )
