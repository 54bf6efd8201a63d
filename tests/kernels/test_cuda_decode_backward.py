"""Gradients of the attention of one token, on a CPU."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from eqxcallback.ops.attention import _cuda_decode_backward as cuda, _reference as reference

from ..ops.table import DTYPES, normal, quickly_compiled, wide
from . import kernels
from .checking import SEEDS, check
from .kernels import BF16, F32, results
from .test_cuda_decode_attention import example


@functools.cache
def _pullback(**options: Any) -> Any:
    def pulled(dout, q, k, v, length):
        return jax.vjp(lambda q, k, v: reference.decode_attention(q, k, v, length, **options), q, k, v)[1](dout)

    return quickly_compiled(pulled)


def backward(
    case, dout, parts: Any = None, *, needed: Any = kernels.ALL, window: Any = 0, soft_cap: Any = 0.0
) -> kernels.Call:
    """`out` is not read. Of the results those of `q`, `k` and `v` are there."""
    q, k, v, length, scale = case
    with pytest.MonkeyPatch.context() as patch:
        if parts is not None:
            patch.setattr(cuda, "parts_of", lambda *_: parts)
        out, more = np.full_like(q, np.nan), (None, None, None)
        grads = kernels.gradients_of([q, k, v], needed)
        dq, *d_kv = kernels.types_of(grads)
        args = (dq, tuple(d_kv), None, *more), (q, (k, v), length, *more), out, dout
        options = {"scale": float(scale), "window": window, "soft_cap": soft_cap, "resident_blocks": 2}
        operands, gradients = [q, k, v, length, *more, out, dout], [*grads, None, *more]
        return kernels.of(cuda.DECODE_ATTENTION_BACKWARD, operands, gradients, args, **options)


def expected(case, dout, **options) -> Any:
    *args, scale = case
    return [np.asarray(x) for x in _pullback(scale=scale, **options)(wide(dout), *map(wide, args))]


def check_gradients(got, wanted, keys):
    """Check the gradients that are needed. Rounding of a gradient is beside the largest of its array."""
    for gradient, exact in zip(got[:3], wanted, strict=True):
        if gradient is not None:
            check(gradient, exact, keys, scale=4 * max(1.0, float(np.max(np.abs(exact), initial=0))))
    assert got[3:] == [None] * 4


def upstream(case) -> Any:
    return normal(9, case[0].shape, case[0].dtype)


# Batch, keys, heads, heads of the cache, size: packs and no packs, one and several lanes, one to several heads in a block.
@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        ((1, 17, 4, 2, 16), [17]),
        ((2, 70, 3, 1, 17), [70, 1]),
        ((2, 130, 6, 1, 64), [130, 1]),
        ((1, 300, 2, 2, 128), [300]),
        ((3, 5, 2, 2, 1), [5, 0, 9]),
        ((1, 40, 1, 1, 256), [33]),
    ],
    ids=str,
)
def test_gradients(shape, lengths):
    for dtype in DTYPES:
        case = example(shape, dtype, lengths=lengths)
        dout = upstream(case)
        got = results(backward(case, dout), misaligned="17" in str(shape[-1:]))
        check_gradients(got, expected(case, dout), shape[1])


@pytest.mark.parametrize("parts", [1, 3, 40])
def test_any_number_of_parts(parts):
    case = example((3, 200, 4, 2, 16), F32, lengths=[200, 0, 65])
    dout = upstream(case)
    got = results(backward(case, dout, parts=parts))
    check_gradients(got, expected(case, dout), 200)


@pytest.mark.parametrize(
    "options", [{"window": 40}, {"window": 1}, {"soft_cap": 0.7}, {"window": 70, "soft_cap": 2.0}], ids=str
)
def test_options(options):
    for dtype in (F32, BF16):
        case = example((3, 150, 6, 2, 24), dtype, lengths=[150, 0, 75])
        dout = upstream(case)
        got = results(backward(case, dout, **options))
        check_gradients(got, expected(case, dout, **options), 150)


@pytest.mark.parametrize("needed", [[0], [1], [2], [0, 2], [1, 2]], ids=str)
def test_gradients_that_are_not_needed(needed):
    """Without those of the cache there is no launch for them."""
    case = example((2, 70, 4, 2, 16), F32, lengths=[70, 41])
    dout = upstream(case)
    call = backward(case, dout, needed=needed)
    assert len(call.launches) == (2 if needed == [0] else 3)
    got = results(call)
    assert [gradient is not None for gradient in got[:3]] == [i in needed for i in range(3)]
    check_gradients(got, expected(case, dout), 70)


@pytest.mark.parametrize("options", [{}, {"window": 20}], ids=str)
def test_keys_that_are_not_seen(options):
    """Beyond the length, or before the window: whatever is there, NaN included, has gradients of zero and adds nothing."""
    q, k, v, lengths, scale = example((1, 150, 3, 1, 8), F32, lengths=[140])
    dout = upstream((q,))
    wanted = expected((q, k, v, lengths, scale), dout, **options)
    for x in (k, v):
        x[:, 140:] = np.nan
        x[:, : 140 - options.get("window", 140)] = np.nan
    got = results(backward((q, k, v, lengths, scale), dout, **options))
    check_gradients(got, wanted, 150)


def test_examples_that_share_a_cache():
    """Its gradients are sums over them, whose lengths differ."""
    q, k, v, lengths, scale = example((6, 70, 4, 2, 16), F32, lengths=[70, 3, 40, 0, 64, 21])
    dout = upstream((q,))
    every = [np.concatenate([x[:2]] * 3) for x in (k, v)]
    dq, *d_kv = expected((q, *every, lengths, scale), dout)
    wanted = [dq, *(x.reshape(3, 2, *x.shape[1:]).sum(axis=0) for x in d_kv)]
    check_gradients(results(backward((q, k[:2], v[:2], lengths, scale), dout)), wanted, 210)


def test_the_order_of_threads_does_not_matter():
    case = example((2, 150, 6, 1, 64), BF16, lengths=[150, 70])
    call = backward(case, upstream(case))
    first, *others = ([x.tobytes() for x in results(call, seed)[:3]] for seed in SEEDS)
    for other in others:
        assert first == other


@pytest.mark.parametrize("shape", [(0, 5, 2, 2, 8), (1, 5, 0, 2, 8), (3, 5, 2, 2, 0), (2, 0, 2, 1, 8)], ids=str)
def test_nothing_to_attend_to(shape):
    case = example(shape, F32)
    for gradient, x in zip(results(backward(case, upstream(case))), case[:3], strict=False):
        np.testing.assert_array_equal(gradient, np.zeros_like(x))


def test_large_logits_choose():
    """With weights of 0 and 1 the scores have no gradient, and only the chosen value has one."""
    q, k, v, lengths, scale = example((2, 140, 2, 1, 8), F32, lengths=[140, 140])
    q[...], k[...] = 1e15, 1
    k[:, 77] = 2
    dout = upstream((q,))
    dq, dk, dv, *_ = results(backward((q, k, v, lengths, scale), dout))
    np.testing.assert_allclose(dq, 0, atol=1e-5)
    np.testing.assert_array_equal(np.delete(dv, 77, axis=1), 0)
    np.testing.assert_allclose(dv[:, 77, 0], dout.sum(axis=1), rtol=1e-6)
    # As exact as dp - delta, times the query.
    np.testing.assert_allclose(dk / 1e15, 0, atol=1e-5)


def calls(dtype):
    for shape in ((2, 70, 3, 1, 17), (1, 130, 6, 1, 64)):
        case = example(shape, dtype, lengths=[shape[1], 2**31 - 1][: shape[0]])
        for needed, options in ((kernels.ALL, {}), ([0], {"window": 40}), ([1], {"soft_cap": 2.0})):
            yield backward(case, upstream(case), needed=needed, **options)
