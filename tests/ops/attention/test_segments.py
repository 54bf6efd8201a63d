"""Attention within segments: the kernels of a CPU leave out the keys before and after all that a block of queries may see."""

from typing import Any

import jax
import numpy as np
import pytest

from eqxcallback import ops

from ..table import normal
from .options import exact, inputs
from .segments import documents, segments


ROWS, BLOCK, HEADS = 300, 64, 4
SEGMENTS = segments(ROWS, BLOCK)
OTHERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": True},
    "window": {"window": 90},
    "length and offset": {"lengths": np.int32(230), "offset": np.int32(20), "causal": True},
}


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("name", SEGMENTS)
def test_values_and_gradients(name, others):
    """The gradients as the reference has them."""
    operands, chosen = inputs(ROWS, ROWS, HEADS, 2, 32), {"segment_ids": SEGMENTS[name], **OTHERS[others]}
    np.testing.assert_allclose(ops.attention(*operands, **chosen), exact(*operands, **chosen), rtol=2e-5, atol=2e-5)

    def gradients(**more):
        def loss(q, k, v):
            return (ops.attention(q, k, v, **chosen, **more) * normal(9, (ROWS, HEADS, 32))).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*operands)

    for got, want in zip(gradients(), gradients(implementation="reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, jax.numpy.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
def test_other_documents_are_not_read(causal, dtype):
    """They are NaN, which a weight of zero would not hide."""
    ids = documents(2 * BLOCK, 3 * BLOCK, BLOCK)
    q, k, v = inputs(len(ids), len(ids), HEADS, 2, 32, dtype)
    others = ids != 1
    q[others], k[others], v[others] = np.nan, np.nan, np.nan

    def loss(q, k, v):
        out = ops.attention(q, k, v, segment_ids=ids, causal=causal, implementation="native")
        return (out[~others].astype(np.float32) ** 2).sum(), out

    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    for x in (out, *gradients):
        assert np.isfinite(np.asarray(x, np.float32)[~others]).all()
