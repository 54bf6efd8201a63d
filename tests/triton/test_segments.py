"""Attention within segments, by the kernels in Triton, interpreted: which blocks of pairs they visit, and with which question."""

import jax
import numpy as np
import pytest

from eqxcallback import ops

from ..ops.attention.options import exact_with_lse, inputs
from ..ops.attention.segments import documents, segments
from .derived import check_each, value_and_gradients


# Blocks have 16 rows.
ROWS, HEADS = 72, 2
SEGMENTS = segments(ROWS, 16)
OTHERS = {
    "alone": {},
    "causal": {"causal": True},
    "window": {"window": 21},
    "causal in a window": {"causal": True, "window": 37},
    "lengths": {"lengths": np.int32(59), "causal": True},
}


CASES = [
    *[(name, others) for name in SEGMENTS for others in ("alone", "causal")],
    *[(name, others) for name in ("documents", "in no order", "keys of others") for others in list(OTHERS)[2:]],
]


@pytest.mark.parametrize(("name", "others"), CASES)
def test_values_and_gradients(name, others, request):
    operands, chosen = inputs(ROWS, ROWS, HEADS, 1, 20), {"segment_ids": SEGMENTS[name], **OTHERS[others]}
    want = value_and_gradients(operands, chosen)
    request.getfixturevalue("interpreted")
    check_each(value_and_gradients(operands, chosen), want)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_of_other_segments_are_not_visited(causal):
    """They are NaN, which a weight of zero would not hide."""
    ids = documents(32, 48, 16)
    q, k, v = inputs(len(ids), len(ids), HEADS, 1, 20)
    others = ids != 1
    q[others], k[others], v[others] = np.nan, np.nan, np.nan

    def loss(q, k, v):
        out = ops.attention(q, k, v, segment_ids=ids, causal=causal)
        return (out[~others] ** 2).sum(), out

    gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    for x in (out, *gradients):
        assert np.isfinite(np.asarray(x)[~others]).all()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", ["documents", "in no order", "keys of others", "no keys"])
def test_few_queries(name, monkeypatch):
    """In parts of the keys that are left."""
    from eqxcallback.ops.attention import _triton

    for limit in ("_MIN_KEYS", "_MIN_PART_KEYS"):
        monkeypatch.setattr(_triton, limit, 16)
    ids = SEGMENTS[name]
    of_queries, of_keys = ids if isinstance(ids, tuple) else (ids, ids)
    q, k, v = inputs(9, ROWS, HEADS, 1, 20)
    assert _triton._parts(q, (k, v)) > 1
    chosen = {"segment_ids": (of_queries[-9:], of_keys), "causal": True}
    for x, want in zip(ops.attention_with_lse(q, k, v, **chosen), exact_with_lse(q, k, v, **chosen), strict=True):
        np.testing.assert_allclose(x, want, rtol=2e-5, atol=2e-5)
