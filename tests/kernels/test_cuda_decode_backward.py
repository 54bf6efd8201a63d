"""Gradients of the attention of one token, on a CPU."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from eqxcallback.ops.attention import _cuda_decode_backward as cuda, _reference as reference

from ..ops.attention.cases import decode_attention
from ..ops.table import DTYPES, normal, quickly_compiled, wide
from . import kernels
from .checking import SEEDS, check
from .kernels import BF16, F32, results
from .test_cuda_decode_attention import OPTIONS, example, example_with


# The operands that have gradients, but for the integers of a cache, by name.
FLOATS = ("q", "k", "v", "alibi_slopes", "k_scale", "v_scale")


@functools.cache
def _pullback(scale: float, window: int, soft_cap: float) -> Any:
    def pulled(dout, length, numbers, integers):
        def attend(numbers):
            options = {"scale": scale, "window": window, "soft_cap": soft_cap}
            return reference.decode_attention(**numbers, **integers, length=length, **options)

        return jax.vjp(attend, numbers)[1](dout)[0]

    return quickly_compiled(pulled)


def backward(
    case,
    dout,
    parts: Any = None,
    *,
    needed: Any = kernels.ALL,
    window: Any = 0,
    soft_cap: Any = 0.0,
    alibi_slopes: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
) -> kernels.Call:
    """`out` is not read. The results are the gradients of all operands, of which `length` and integers have none."""
    q, k, v, length, scale = case
    with pytest.MonkeyPatch.context() as patch:
        if parts is not None:
            patch.setattr(cuda, "parts_of", lambda *_: parts)
        out, more = np.full_like(q, np.nan), (alibi_slopes, k_scale, v_scale)
        grads = kernels.gradients_of([q, k, v, length, *more], needed)
        dq, dk, dv, dlength, *d_more = kernels.types_of(grads)
        args = (dq, (dk, dv), dlength, *d_more), (q, (k, v), length, *more), out, dout
        options = {"scale": float(scale), "window": window, "soft_cap": soft_cap, "resident_blocks": 2}
        return kernels.of(cuda.DECODE_ATTENTION_BACKWARD, [q, k, v, length, *more, out, dout], grads, args, **options)


def expected(case, dout, *, window: int = 0, soft_cap: float = 0.0, **more) -> dict[str, Any]:
    """The gradients by name."""
    q, k, v, length, scale = case
    operands = {name: wide(x) for name, x in {"q": q, "k": k, "v": v, **more}.items()}
    integers = {name: x for name, x in operands.items() if x.dtype == np.int8}
    numbers = {name: x for name, x in operands.items() if name not in integers}
    made = _pullback(scale, window, soft_cap)(wide(dout), length, numbers, integers)
    return {name: np.asarray(x) for name, x in made.items()}


def check_gradients(got, wanted, keys):
    """Check the gradients that are needed. Rounding of a gradient is beside the largest of its array."""
    dq, dk, dv, dlength, *d_more = got
    assert dlength is None
    for name, gradient in zip(FLOATS, (dq, dk, dv, *d_more), strict=True):
        if gradient is not None:
            exact = wanted[name]
            check(gradient, exact, keys, scale=4 * max(1.0, float(np.max(np.abs(exact), initial=0))))


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


# Names as in OPTIONS of the forward kernel.
ALSO = {
    **OPTIONS,
    "window and soft cap": {"window": 70, "soft_cap": 2.0},
    "window and slopes": {"window": 40, "slopes": True},
    "slopes and int8": {"slopes": True, "int8": True},
}


# Packs and no packs, 8 and 16 columns in a lane, one to several heads in a block.
@pytest.mark.parametrize("options", ALSO.values(), ids=list(ALSO))
@pytest.mark.parametrize(
    "shape", [(3, 150, 6, 2, 24), (2, 91, 3, 1, 17), (2, 70, 4, 4, 32), (1, 67, 6, 2, 264)], ids=str
)
def test_options(shape, options):
    for dtype in DTYPES:
        case, more = example_with(options, shape, dtype)
        dout = upstream(case)
        got = results(backward(case, dout, **more), misaligned=shape[-1] == 17)
        names = {"q", *({"k_scale", "v_scale"} if options.get("int8") else {"k", "v"})}
        names |= {"alibi_slopes"} if options.get("slopes") else set()
        given = [*got[:3], *got[4:]]
        assert {name for name, gradient in zip(FLOATS, given, strict=True) if gradient is not None} == names
        check_gradients(got, expected(case, dout, **more), shape[1])


# Columns in a lane, and heads in a block.
@pytest.mark.parametrize(
    ("shape", "instance"),
    [
        ((1, 70, 4, 1, 256), "4, 8, true"),
        ((1, 70, 4, 1, 257), "2, 16, false"),
        ((1, 70, 4, 4, 512), "1, 16, true"),
        ((2, 70, 2, 1, 513), "1, 32, false"),
        ((2, 33, 2, 2, 1024), "1, 32, true"),
    ],
    ids=str,
)
def test_long_heads(shape, instance):
    for dtype in DTYPES:
        case = example(shape, dtype, lengths=[shape[1], 31][: shape[0]])
        dout = upstream(case)
        for options in ({}, {"window": 40}):
            call = backward(case, dout, **options)
            assert f", {instance}, false, false>" in call.launches[0].entry
            check_gradients(results(call), expected(case, dout, **options), shape[1])


@pytest.mark.parametrize("axes", [(3,), (1, 3), (2, 1, 3), (1, 2, 3), (2, 2, 3)], ids=str)
def test_slopes_of_a_part_of_the_batch(axes):
    """Their gradients are sums over the examples that share them."""
    case = *decode_attention(F32, (2, 2), 20, 3, 1, 8, lengths=[[20, 5], [0, 13]]).args, 0.3
    slopes: Any = np.abs(normal(7, axes))
    dout = upstream(case)
    got = results(backward(case, dout, alibi_slopes=slopes))
    check_gradients(got, expected(case, dout, alibi_slopes=slopes), 80)


@pytest.mark.parametrize("parts", [1, 3, 40])
def test_any_number_of_parts_with_options(parts):
    options = {"window": 170, "slopes": True, "int8": True}
    case, more = example_with(options, (3, 200, 4, 2, 16), F32)
    dout = upstream(case)
    check_gradients(results(backward(case, dout, parts=parts, **more)), expected(case, dout, **more), 200)


# Indices of operands, and the kernels that are launched.
@pytest.mark.parametrize(
    ("options", "needed", "launched"),
    [
        ({}, [0], ["", "_join"]),
        ({}, [1], ["", "_join", "_keys"]),
        ({}, [2], ["", "_join", "_keys"]),
        ({}, [0, 2], ["", "_join", "_keys"]),
        ({}, [1, 2], ["", "_join", "_keys"]),
        ({"slopes": True}, [0], ["", "_join"]),
        ({"slopes": True}, [4], ["", "_join", "_slopes"]),
        ({"slopes": True}, [2, 4], ["", "_join", "_keys", "_slopes"]),
        ({"int8": True}, [0], ["", "_join"]),
        ({"int8": True}, [5], ["", "_join", "_keys"]),
        ({"int8": True}, [0, 6], ["", "_join", "_keys"]),
    ],
    ids=str,
)
def test_gradients_that_are_not_needed(options, needed, launched):
    """Nothing is launched for gradients of the cache, or of slopes, that nobody needs."""
    case, more = example_with(options, (2, 70, 4, 2, 16), F32)
    dout = upstream(case)
    call = backward(case, dout, needed=needed, **more)
    names = [launch.entry.partition("<")[0].removeprefix("decode_attention_backward") for launch in call.launches]
    assert names == launched
    got = results(call)
    assert [i for i, gradient in enumerate(got) if gradient is not None] == needed
    check_gradients(got, expected(case, dout, **more), 70)


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


def test_keys_that_are_not_seen_in_int8():
    case, more = example_with({"int8": True, "window": 20}, (1, 150, 3, 1, 16), F32)
    case[3][...] = 140
    dout = upstream(case)
    wanted = expected(case, dout, **more)
    for x in (more["k_scale"], more["v_scale"]):
        x[:, 140:], x[:, :120] = np.nan, np.nan
    check_gradients(results(backward(case, dout, **more)), wanted, 150)


def test_examples_that_share_a_cache():
    """Its gradients are sums over them, whose lengths differ."""
    q, k, v, lengths, scale = example((6, 70, 4, 2, 16), F32, lengths=[70, 3, 40, 0, 64, 21])
    dout = upstream((q,))
    every = [np.concatenate([x[:2]] * 3) for x in (k, v)]
    wanted = expected((q, *every, lengths, scale), dout)
    wanted |= {name: _of_two(wanted[name]) for name in ("k", "v")}
    check_gradients(results(backward((q, k[:2], v[:2], lengths, scale), dout)), wanted, 210)


def _of_two(gradient: Any) -> Any:
    """The sums over three examples each."""
    return gradient.reshape(3, 2, *gradient.shape[1:]).sum(axis=0)


def test_examples_that_share_a_cache_in_int8():
    (q, k, v, _, scale), more = example_with({"int8": True, "slopes": True}, (6, 70, 4, 2, 16), F32)
    lengths = np.array([70, 3, 40, 0, 64, 21], np.int32)
    dout = upstream((q,))
    caches = {"k": k, "v": v, **{name: more[name] for name in ("k_scale", "v_scale")}}
    every = {name: np.concatenate([x[:2]] * 3) for name, x in caches.items()}
    scales = {name: every[name] for name in ("k_scale", "v_scale")}
    wanted = expected((q, every["k"], every["v"], lengths, scale), dout, **{**more, **scales})
    wanted |= {name: _of_two(wanted[name]) for name in scales}
    own = {**more, **{name: x[:2] for name, x in more.items() if name in scales}}
    check_gradients(results(backward((q, k[:2], v[:2], lengths, scale), dout, **own)), wanted, 210)


@pytest.mark.parametrize("options", [{}, {"slopes": True, "int8": True}], ids=str)
def test_the_order_of_threads_does_not_matter(options):
    case, more = example_with(options, (2, 150, 6, 1, 64), BF16)
    call = backward(case, upstream(case), **more)
    first, *others = ([x.tobytes() for x in results(call, seed) if x is not None] for seed in SEEDS)
    for other in others:
        assert first == other


@pytest.mark.parametrize("options", [{}, {"slopes": True}, {"int8": True}], ids=str)
@pytest.mark.parametrize("shape", [(0, 5, 2, 2, 8), (1, 5, 0, 2, 8), (3, 5, 2, 2, 0), (2, 0, 2, 1, 8)], ids=str)
def test_nothing_to_attend_to(shape, options):
    case, more = example_with(options, shape, F32)
    for gradient in results(backward(case, upstream(case), **more)):
        if gradient is not None:
            np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


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
    for shape in ((2, 70, 3, 1, 17), (1, 130, 6, 1, 64), (1, 9, 2, 1, 600)):
        case = example(shape, dtype, lengths=[shape[1], 2**31 - 1][: shape[0]])
        for needed, options in ((kernels.ALL, {}), ([0], {"window": 40}), ([1], {"soft_cap": 2.0})):
            if shape[-1] <= 512 or "soft_cap" not in options:
                yield backward(case, upstream(case), needed=needed, **options)
    for shape in ((2, 70, 3, 1, 17), (1, 130, 6, 1, 64)):
        for options in ({"slopes": True}, {"int8": True}, {"slopes": True, "int8": True, "window": 40}):
            case, more = example_with(options, shape, dtype)
            yield backward(case, upstream(case), **more)
