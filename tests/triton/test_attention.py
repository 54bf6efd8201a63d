"""The attention kernels against their reference, interpreted."""

import itertools

import numpy as np
import pytest

from .cases import ALL, Case


LARGE_LOGITS = [
    *[Case(20, 30, causal=causal, offset=offset) for causal in (True, False) for offset in (1e4, -1e4)],
    *[Case(20, 30, causal=causal, scale=scale) for causal in (True, False) for scale in (300.0, -300.0)],
]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_forward(case, interpreter):
    *operands, out, lse = case.forward(interpreter)
    case.check(out, case.wanted[0])
    np.testing.assert_allclose(lse, case.lse, rtol=1e-5, atol=1e-5)
    for after, before in zip(operands, case.operands, strict=False):
        assert after.tobytes() == before.tobytes()


@pytest.mark.parametrize("case", ALL, ids=str)
def test_backward(case, interpreter):
    arrays = case.backward(interpreter)
    for got, want in zip(arrays[5:8], case.wanted[1:4], strict=True):
        case.check(got, want)
    q, k, v, dout = case.operands
    for after, before in zip(arrays[:5], (q, k, v, case.wanted[0].astype(case.dtype), dout), strict=True):
        assert after.tobytes() == before.tobytes()


@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=3)), ids=str)
def test_gradients_that_are_not_needed(needed, interpreter):
    case = Case(17, 33, 40, causal=True, heads=2)
    for is_needed, got, want in zip(needed, case.backward(interpreter, needed)[5:8], case.wanted[1:4], strict=True):
        if is_needed:
            case.check(got, want)
        else:
            assert got is None


def test_gradients_of_keys_that_nobody_asks_for_are_zero(interpreter):
    case = Case(0, 17)
    _, dk, dv = case.backward(interpreter)[5:8]
    assert not dk.any()
    assert not dv.any()


@pytest.mark.parametrize("case", LARGE_LOGITS, ids=str)
def test_large_logits(case, interpreter):
    """Logits up to 1e4, where an f32 is exact to 5e-4: that is how exact the weights can be."""
    lost = float(np.finfo(np.float32).eps) * 1e4
    case.check(case.forward(interpreter)[3], case.wanted[0], lost)
    for got, want in zip(case.backward(interpreter)[5:8], case.wanted[1:4], strict=True):
        case.check(got, want, 2 * lost)


@pytest.mark.parametrize("causal", [True, False])
def test_statistics(causal, interpreter):
    """`lse` is of natural logarithms. The kernels of gradients get inf where a query sees no key."""
    case = Case(21, 17, causal=causal)
    q, k, _, dout = (x.astype(np.float64)[0, :, 0] for x in case.operands)
    logits = case.used_scale * q @ k.T
    if causal:
        logits[~np.tri(21, 17, 17 - 21, dtype=bool)] = -np.inf
    with np.errstate(divide="ignore"):
        want = np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(case.forward(interpreter)[4][0, :, 0], want, rtol=1e-6)
    sums, delta = case.backward(interpreter)[8:]
    np.testing.assert_allclose(sums[0, 0], np.where(np.isinf(want), np.inf, want), rtol=1e-6)
    np.testing.assert_allclose(delta[0, 0], (case.wanted[0][0, :, 0] * dout).sum(1), atol=1e-6)
