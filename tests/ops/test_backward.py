"""The gradients of kernels, on every instruction set, against those of the definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import _ext

from . import cases
from .cases import DTYPES, normal


SHAPES = [
    *[
        (cases.rms_norm, (*batch, size), weight)
        for batch, size in (((), 17), ((3,), 1), ((2, 9), 63))
        for weight in (0, 1)
    ],
    *[
        (cases.layer_norm, (*batch, size), weight, bias)
        for batch, size in (((), 17), ((19,), 5), ((2, 3), 100))
        for weight in (0, 1)
        for bias in (0, 1)
    ],
    *[(cases.rms_norm, shape) for shape in ((0, 5), (2, 0, 3), (67, 3))],
    (cases.layer_norm, (0, 5)),
    *[(cases.swiglu, shape, packed) for shape in ((34,), (3, 2), (2, 3, 126)) for packed in (0, 1)],
    *[
        (cases.rotary_embedding, (*batch, 3, 2, size), shared)
        for batch, size in (((), 2), ((4,), 34), ((2, 3), 6))
        for shared in (0, 1)
    ],
    *[(cases.softmax_cross_entropy, (*batch, size)) for batch, size in (((), 17), ((3,), 1), ((2, 3), 300))],
    (cases.softmax_cross_entropy, (2, 5000)),
]
LARGE = [
    (cases.rms_norm, (1001, 1023)),
    (cases.layer_norm, (1001, 1023)),
    (cases.swiglu, (301, 2002), 1),
    (cases.rotary_embedding, (2, 501, 9, 126), 1),
    (cases.softmax_cross_entropy, (301, 2003)),
]


@functools.cache
def gradient_of(function, numbers):
    """One function for each op: JAX compiles it once, for all instruction sets."""

    def loss(upstream, *args):
        return (function(*args).astype(jnp.float32) * upstream).sum()

    return jax.grad(loss, tuple(i + 1 for i in numbers))


def gradients(function, args, upstream):
    return [np.asarray(g) for g in cases.quickly_compiled(gradient_of(function, numbers(args)))(upstream, *args)]


def numbers(args):
    return tuple(i for i, x in enumerate(args) if x.dtype in DTYPES)


def upstream_of(case):
    """As the kernel gets it."""
    upstream = normal(9, jax.eval_shape(case.op, *case.args).shape)
    return upstream.astype(case.dtype or case.args[0].dtype).astype(np.float32)


def check(case, found, want):
    for got, exact in zip(found, want, strict=True):
        cases.tolerate(got, exact, 4 * case.terms + case.args[0].size)


@functools.cache
def every_case(dtype):
    found = [make(dtype, *arguments) for make, *arguments in SHAPES]
    upstreams = [upstream_of(case) for case in found]
    return (
        found,
        upstreams,
        every_gradient([case.definition for case in found], [case.wide() for case in found], upstreams),
    )


def every_gradient(functions, operands, upstreams):
    of_each = tuple(gradient_of(f, numbers(args)) for f, args in zip(functions, operands, strict=True))
    all_operands = [(upstream, *args) for upstream, args in zip(upstreams, operands, strict=True)]
    return jax.device_get(cases.quickly_compiled(cases.together(of_each))(all_operands))


@functools.cache
def every_result(dtype, isa):
    assert isa == _ext.isa()
    found, upstreams, _ = every_case(dtype)
    return every_gradient([case.op for case in found], [case.args for case in found], upstreams)


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=lambda number: cases.name(*SHAPES[number]))
def test_values(number, isa):
    for dtype in DTYPES:
        found, _, wants = every_case(dtype)
        check(found[number], every_result(dtype, isa)[number], wants[number])


@pytest.mark.parametrize("make", LARGE, ids=lambda make: cases.name(*make))
def test_work_for_many_threads(make, isa):
    case = make[0](DTYPES[0], *make[1:])
    upstream = upstream_of(case)
    first, second = (gradients(case.op, case.args, upstream) for _ in range(2))
    check(case, first, gradients(case.definition, case.wide(), upstream))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("make", LARGE, ids=lambda make: make[0].__name__)
def test_kernels_compute_them(make):
    case = make[0](DTYPES[0], *make[1:])
    text = jax.jit(jax.grad(lambda *args: case.op(*args).sum(), numbers(case.args))).lower(*case.args).as_text()
    assert f"@eqxcallback_{make[0].__name__}_backward" in text


@pytest.mark.parametrize("size", [1e13, 1e18, 1e25, 1e35])
@pytest.mark.parametrize("make", [cases.rms_norm, cases.layer_norm], ids=lambda make: make.__name__)
def test_squares_that_overflow(make, size, isa):
    """A norm does not depend on the size of a row, and its derivative is inverse to it."""
    small = make(DTYPES[0], (5, 70))
    factors = np.array([1, size, size, 1, size], np.float32)[:, None]
    large = cases.Case(small.op, small.definition, (small.args[0] * factors, *small.args[1:]), small.terms)
    want, upstream = small.want(), normal(9, (5, 70))
    for function in (large.op, large.definition):
        np.testing.assert_allclose(cases.quickly_compiled(function)(*large.args), want, rtol=2e-4, atol=2e-4)
        found = gradients(function, large.args, upstream)
        expected = gradients(small.definition, small.args, upstream)
        np.testing.assert_allclose(found[0] * factors, expected[0], rtol=2e-4, atol=2e-4)
        for got, exact in zip(found[1:], expected[1:], strict=True):
            np.testing.assert_allclose(got, exact, rtol=2e-4, atol=2e-4)


def test_labels_that_are_none(isa):
    """Their loss is NaN, and their gradient zero."""
    logits, labels = normal(1, (6, 5), scale=3.0), np.array([5, -6, 4, -1, 2**31 - 1, -(2**31)], np.int32)
    case = cases.softmax_cross_entropy(DTYPES[0], (6, 5))
    np.testing.assert_array_equal(np.isnan(case.op(logits, labels)), [True, True, False, False, True, True])
    got, want = (gradients(f, (logits, labels), np.ones(6, np.float32))[0] for f in (case.op, case.definition))
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert (got[[0, 1, 4, 5]] == 0).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e38, -1e38])
def test_logits_of_any_size(value, isa):
    case = cases.softmax_cross_entropy(DTYPES[0], (4, 37))
    logits, labels = np.array(case.args[0]), np.array([0, 1, 2, -1], np.int32)
    logits[0, 0] = logits[1, 36] = value
    logits[2] = value
    want, got = (np.asarray(f(jnp.asarray(logits), jnp.asarray(labels))) for f in (case.definition, case.op))
    np.testing.assert_allclose(got, want, rtol=1e-6)
