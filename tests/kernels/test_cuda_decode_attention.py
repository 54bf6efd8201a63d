"""The attention of one token, on a CPU."""

import functools
import math
from typing import Any

import numpy as np
import pytest

from eqxcallback.ops.attention import _reference as reference

from ..ops.attention.cases import decode_attention
from ..ops.table import DTYPES, normal, with_options
from . import kernels
from .checking import ROWS, SEEDS, check, want
from .kernels import BF16, F32, results


def scaled(args) -> Any:
    """With the scale, which the kernel is told."""
    return *args, 1 / math.sqrt(max(args[0].shape[-1], 1))


def example(shape, dtype, lengths=None) -> Any:
    batch, *of_one = shape
    return scaled(decode_attention(dtype, (batch,), *of_one, lengths=lengths).args)


def expected(q, k, v, lengths, scale):
    return want(with_options(reference.decode_attention, scale=scale), q, k, v, lengths)


@pytest.mark.parametrize("row", ROWS["decode_attention"], ids=str)
def test_values(row):
    for dtype in DTYPES:
        case, wanted = row.wanted(dtype)
        check(results(kernels.decode_attention(*scaled(case.args)))[0], wanted, case.terms)


@pytest.mark.parametrize("size", [8, 248, 256, 264, 512])
def test_four_heads_in_a_block(size):
    """Shorter heads have fewer columns in a thread."""
    for dtype in DTYPES:
        case = example((2, 70, 5, 1, size), dtype, lengths=[70, 41])
        call = kernels.decode_attention(*case)
        assert call.launches[0].entry.endswith(f", 4, {8 if size <= 256 else 16}, true, false>")
        check(results(call)[0], expected(*case), 70)


@pytest.mark.parametrize("parts", [1, 2, 3, 40])
def test_any_number_of_parts(parts):
    case = example((3, 200, 4, 2, 16), F32, lengths=[200, 0, 65])
    check(results(kernels.decode_attention(*case, parts=parts))[0], expected(*case), 200)


@pytest.mark.parametrize("length", [-1, 0, 1, 15, 16, 17, 63, 64, 65, 149, 150, 151])
def test_lengths(length):
    """The kernel does not read what lies beyond a length."""
    q, k, v, lengths, scale = example((1, 150, 3, 1, 8), F32, lengths=[length])
    k[:, max(length, 0) :], v[:, max(length, 0) :] = np.nan, np.nan
    (got,) = results(kernels.decode_attention(q, k, v, lengths, scale))
    check(got, expected(q, np.nan_to_num(k), np.nan_to_num(v), lengths, scale), 150)
    assert length > 0 or (got == 0).all()


def test_cache_and_length_of_a_part_of_the_batch():
    """The other examples share the cache and the length of these."""
    q, k, v, lengths, scale = example((6, 70, 4, 2, 16), BF16, lengths=[70, 3, 40] * 2)
    every_k, every_v = (np.concatenate([x[:2]] * 3) for x in (k, v))
    (got,) = results(kernels.decode_attention(q, k[:2], v[:2], lengths[:3], scale))
    check(got, expected(q, every_k, every_v, lengths, scale), 86)


def test_the_order_of_threads_does_not_matter():
    call = kernels.decode_attention(*example((2, 150, 6, 1, 64), BF16, lengths=[150, 70]))
    assert len({results(call, seed)[0].tobytes() for seed in SEEDS}) == 1


@pytest.mark.parametrize("shape", [(0, 5, 2, 2, 8), (1, 5, 0, 2, 8), (3, 5, 2, 2, 0), (2, 0, 2, 1, 8)], ids=str)
def test_nothing_to_attend_to(shape):
    case = example(shape, F32)
    (got,) = results(kernels.decode_attention(*case))
    np.testing.assert_array_equal(got, np.zeros_like(case[0]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_not_finite(operand, value):
    case = example((2, 17, 2, 1, 9), F32, lengths=[17, 17])
    case[operand][(1, 0, 0) if operand == 0 else (1, 5, 0, 0)] = value
    got, reference_got = results(kernels.decode_attention(*case))[0], expected(*case)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(reference_got))
    np.testing.assert_allclose(got[0], reference_got[0], atol=1e-5)


@pytest.mark.parametrize("size", [1e4, -1e4, 1e15])
def test_large_logits_choose(size):
    q, k, v, lengths, scale = example((2, 140, 2, 1, 8), F32, lengths=[140, 140])
    q[...], k[...] = size, 1
    k[:, 77] = 2 if size > 0 else 0.5
    (got,) = results(kernels.decode_attention(q, k, v, lengths, scale))
    np.testing.assert_array_equal(got, np.broadcast_to(v[:, 77], got.shape))


def test_all_logits_are_very_low():
    q, k, v, lengths, scale = example((1, 20, 2, 1, 8), F32, lengths=[20])
    q[...], k[...] = 1e17, -1e17
    (got,) = results(kernels.decode_attention(q, k, v, lengths, scale))
    np.testing.assert_allclose(got, np.broadcast_to(v.mean(axis=1), got.shape), atol=1e-6)


OPTIONS = {
    "window": {"window": 40},
    "window of one": {"window": 1},
    "window of all": {"window": 1000},
    "soft cap": {"soft_cap": 1.5},
    "slopes": {"slopes": True},
    "int8": {"int8": True},
    "all": {"window": 70, "soft_cap": 2.0, "slopes": True, "int8": True},
}


def example_with(options, shape, dtype) -> Any:
    """`options` as in OPTIONS. Some examples have other lengths than others."""
    batch, keys, heads, kv_heads, _ = shape
    q, k, v, lengths, scale = example(shape, dtype, lengths=([keys, 0, keys // 2] * batch)[:batch])
    more: dict[str, Any] = {name: x for name, x in options.items() if name in ("window", "soft_cap")}
    if options.get("slopes"):
        more["alibi_slopes"] = np.abs(normal(7, (batch, heads)))
    if options.get("int8"):
        k, v = (np.round(np.asarray(x, np.float32) * 30).clip(-128, 127).astype(np.int8) for x in (k, v))
        more |= {name: np.abs(normal(i, (batch, keys, kv_heads))) / 30 for i, name in enumerate(("k_scale", "v_scale"))}
    return (q, k, v, lengths, scale), more


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("shape", [(3, 200, 6, 1, 16), (2, 90, 4, 2, 17), (2, 70, 2, 1, 520)], ids=str)
def test_options(shape, options):
    _, keys, *_, size = shape
    if size > 512:
        options = {name: x for name, x in options.items() if name == "window"}
    for dtype in DTYPES:
        (q, k, v, lengths, scale), more = example_with(options, shape, dtype)
        definition = functools.partial(reference.decode_attention, **more, scale=scale)
        (got,) = results(kernels.decode_attention(q, k, v, lengths, scale, **more))
        check(got, want(definition, q, k, v, lengths), keys)


def test_keys_before_a_window_are_not_read():
    q, k, v, lengths, scale = example((1, 150, 3, 1, 8), F32, lengths=[140])
    k[:, :120], v[:, :120] = np.nan, np.nan
    (got,) = results(kernels.decode_attention(q, k, v, lengths, scale, window=20))
    definition = functools.partial(reference.decode_attention, scale=scale, window=20)
    check(got, want(definition, q, np.nan_to_num(k), np.nan_to_num(v), lengths), 150)


@pytest.mark.parametrize("axes", [(3,), (1, 3), (2, 1, 3), (2, 2, 3)], ids=str)
def test_slopes_of_a_part_of_the_batch(axes):
    args = decode_attention(F32, (2, 2), 20, 3, 1, 8, lengths=20).args
    slopes: Any = np.abs(normal(7, axes))
    (got,) = results(kernels.decode_attention(*scaled(args), alibi_slopes=slopes))
    every: Any = np.broadcast_to(slopes, (2, 2, 3))
    definition = functools.partial(reference.decode_attention, alibi_slopes=every, scale=scaled(args)[-1])
    check(got, want(definition, *args), 30)
