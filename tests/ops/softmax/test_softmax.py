"""Softmax by each kernel: values, edges, masks, gradients, and what it refuses."""

import collections
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import ops
from eqxcallback.ops.softmax import _reference
from eqxcallback.ops.softmax._softmax import _softmax

from .. import table
from ..gradients import gradients, upstream_of
from ..table import DTYPES, ROUNDING, normal, with_options
from .cases import EDGES, softmax


pytestmark = pytest.mark.any_jax_version

F32 = DTYPES[0]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_size = pytest.mark.parametrize("size", [1, 16, 33, 300])


@pytest.mark.parametrize("implementation", ["auto", "python"])
@by_dtype
def test_jax_agrees(dtype, implementation, isa):
    """If something takes part in each row, it is `jax.nn.softmax`, but for the rounding."""
    x, mask = normal(1, (2, 5, 37), dtype, 4.0), np.random.default_rng(2).random((5, 37)) < 0.5
    mask[:, 3] = True
    for scale, where in ((1.0, None), (0.3, None), (-0.3, mask), (1.0, mask)):
        wide = jnp.asarray(x).astype(jnp.float32) * scale
        every = None if where is None else jnp.broadcast_to(where, x.shape)
        got = ops.softmax(x, where, scale=scale, implementation=implementation)
        table.tolerate(got, np.asarray(jax.nn.softmax(wide, where=every)), 37)


def by_hand(x, mask, scale):
    """In f64."""
    x = np.asarray(x, np.float64) * scale
    mask = np.broadcast_to(mask, x.shape)
    out = np.zeros(x.shape)
    for row, taking, result in zip(*(a.reshape(-1, x.shape[-1]) for a in (x, mask, out)), strict=True):
        if taking.any():
            powers = np.exp(row[taking] - row[taking].max())
            result[taking] = powers / powers.sum()
    return out


@pytest.mark.parametrize("implementation", ["auto", "python", "reference"])
@by_dtype
@by_size
def test_what_the_mask_hides_may_be_anything(size, dtype, implementation, isa):
    """The same bits as of zeros there; exactly 0, and rows of which nothing takes part are 0."""
    mask = np.random.default_rng(size).random((5, size)) < 0.5
    mask[1], mask[2] = False, True
    x = normal(1, (5, size), dtype, 3.0)
    f = lambda x: jax.jit(with_options(ops.softmax, implementation=implementation))(x, mask)
    want = np.asarray(f(np.where(mask, x, np.zeros_like(x))))
    assert (want[~mask] == 0).all()
    table.tolerate(want, by_hand(x, mask, 1.0), size)
    for value in (np.nan, np.inf, -np.inf, 3e4):
        got = np.asarray(f(np.where(mask, x, np.asarray(value, dtype))))
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("implementation", ["auto", "python"])
@by_dtype
@by_size
def test_not_finite(size, dtype, implementation, isa):
    """One row each: NaN, inf, -inf, nothing but -inf; each alone in its place, and then with a mask as well."""
    x = normal(1, (6, size), dtype)
    x[0, size // 2], x[1, -1], x[2, 0], x[3] = np.nan, np.inf, -np.inf, -np.inf
    mask = np.ones((6, size), bool)
    mask[:, 1::3] = False
    for where in (None, mask):
        for scale in (1.0, -1.0):
            got = np.asarray(ops.softmax(x, where, scale=scale, implementation=implementation), np.float32)
            want = table.quickly_compiled(with_options(_reference.softmax, scale=scale))(
                x.astype(np.float32), *([] if where is None else [where])
            )
            np.testing.assert_allclose(got, want, rtol=ROUNDING[dtype], atol=1e-7)
    with_jax = jax.nn.softmax(jnp.asarray(x.astype(np.float32)), where=jnp.asarray(mask))
    want = np.asarray(_reference.softmax(jnp.asarray(x.astype(np.float32)), jnp.asarray(mask), scale=1.0))
    np.testing.assert_allclose(want, with_jax, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("implementation", ["auto", "python", "reference"])
def test_large_logits(implementation, isa):
    """Their difference counts, not where they lie; no product with the scale overflows."""
    top = float(np.finfo(np.float32).max)
    x: Any = np.array([[1e4, 1e4 - 1, -1e4], [top, top, -top], [-1e30, -1e30, -top], [1e30, 0, 1e30]], np.float32)
    e = 1 / (1 + np.exp(-1))
    want = [[e, 1 - e, 0], [0.5, 0.5, 0], [0.5, 0.5, 0], [0.5, 0, 0.5]]
    np.testing.assert_allclose(ops.softmax(x, implementation=implementation), want, rtol=1e-6)
    np.testing.assert_allclose(ops.softmax(x[1:], scale=1e3, implementation=implementation), want[1:], rtol=1e-6)
    np.testing.assert_allclose(ops.softmax(-x, scale=-1, implementation=implementation), want, rtol=1e-6)


@pytest.mark.parametrize(
    "shape", [(), (1,), (37,), (1, 37), (3, 1), (3, 37), (1, 1, 1, 37), (2, 1, 1, 1), (2, 4, 3, 37)]
)
def test_any_mask_that_broadcasts(shape, isa):
    x, mask = normal(1, (2, 4, 3, 37)), np.random.default_rng(3).random(shape) < 0.7
    np.testing.assert_allclose(ops.softmax(x, mask), by_hand(x, mask, 1.0), rtol=1e-5, atol=1e-7)


# Gradients.


@pytest.mark.parametrize("make", [*EDGES, ((67, 40), (67, 40), 0.5)], ids=str)
@by_dtype
def test_gradients(make, dtype, isa):
    """In 16 bits, the kernel reads the rounded result: so near as the largest element and cotangent are rounded."""
    case = softmax(dtype, *make)
    upstream = upstream_of(case)
    (got,) = gradients(case.op, case.args, upstream)
    (want,) = gradients(case.reference, case.wide(), upstream)
    assert got.dtype == dtype
    largest = float(np.abs(upstream).max(initial=1.0)) * max(1.0, abs(make[2] if len(make) > 2 else 1.0))
    atol = largest * {2: 2.0 * ROUNDING[dtype], 4: 2.0**-20}[np.dtype(dtype).itemsize]
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=2 * ROUNDING[dtype], atol=atol)
    if len(case.args) > 1:
        assert (got[~np.broadcast_to(case.args[1], got.shape)] == 0).all()


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_no_gradient_where_nothing_takes_part(implementation, isa):
    """The hidden values, and the cotangents there, do not matter; rows that are NaN have no gradient there either."""
    mask = np.random.default_rng(0).random((5, 37)) < 0.5
    mask[1], mask[3, :2] = False, (True, False)
    x = np.where(mask, normal(1, (5, 37)), np.float32(np.nan))
    x[3, 0] = np.nan
    upstream = np.where(mask, normal(2, (5, 37)), np.float32(np.inf))
    f = lambda x: ops.softmax(x, mask, implementation=implementation)
    (got,) = jax.vjp(f, x)[1](upstream)
    got = np.asarray(got)
    assert (got[~mask] == 0).all()
    assert np.isfinite(np.delete(got, 3, axis=0)).all()
    assert np.isnan(got[3, 0])


# Everything else.


def test_large_results(isa):
    """Results of more than 32 MiB, which kernels write past the caches, are the same as those of smaller calls."""

    @jax.jit
    def f(x, upstream):
        out, pull = jax.vjp(ops.softmax, x)
        return out, *pull(upstream)

    for size in (1056, 1058):
        x, upstream = (np.asarray(jax.random.normal(jax.random.key(seed), (4100, size))) for seed in range(2))
        parts = [f(*arrays) for arrays in zip(*(np.split(a, 4) for a in (x, upstream)), strict=True)]
        for got, *want in zip(f(x, upstream), *parts, strict=True):
            np.testing.assert_array_equal(got, np.concatenate(want))


def test_what_the_kernel_gets_under_vmap():
    """One call for all examples, and a mask that they share stays one."""
    x, mask = normal(1, (7, 3, 5)), np.ones((3, 5), bool)
    text = jax.jit(jax.vmap(ops.softmax, (0, None))).lower(x, mask).as_text()
    (line,) = [line for line in text.splitlines() if "custom_call @eqxcallback_" in line]
    assert ": (tensor<7x3x5xf32>, tensor<3x5xi1>)" in line
    assert "while" not in text


@pytest.mark.parametrize("mask", [None, (3, 5)])
def test_check(mask):
    case = softmax(F32, (3, 5), mask, 0.5)
    report = eqxc.testing.check(_softmax, *map(jnp.asarray, case.args), scale=0.5)
    assert report["reference"].result == "ok"


def test_other_floats(x64):
    x = normal(1, (3, 5), np.float64)
    got = ops.softmax(x, np.ones(5, bool), scale=0.5)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, by_hand(x, True, 0.5), rtol=1e-14)


def test_supports():
    """By both kinds of kernels, forward and backward, in words."""
    types: Any = jax.ShapeDtypeStruct((2, 3), jnp.float64)
    named = collections.namedtuple("Types", ["x", "mask"])
    backward: Any = _softmax.backward
    each: Any = [*_softmax.kernels.values(), *backward.values()]
    kernels = [kernel for kernel in itertools.chain(*each) if not isinstance(kernel, eqxc.PythonKernel)]
    assert len(kernels) == 4
    for kernel in kernels:
        assert (
            kernel.supports(named(types, None), scale=1.0) == "x has to be float32, bfloat16 or float16; it is float64"
        )
        assert kernel.supports(named(types.update(dtype=jnp.float16), None), scale=1.0) is True


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("spread", "mean"), [(8.0, 3), (0.1, 0), (4.0, 100)])
def test_gradients_of_sixteen_bits_count_the_rounding_of_the_result_once(spread, mean, dtype, isa):
    """They are 1.2 to 1.5 times as far off as those of f32, rounded. Differences from a plain sum of rounded weights are 6
    times as far off in nearly one-hot rows, and much farther where cotangents are nearly equal.
    """
    x, upstream = normal(1, (64, 500), dtype, spread), normal(2, (64, 500), dtype) + np.asarray(mean, dtype)

    def gradient(x, upstream):
        return jax.vjp(ops.softmax, x)[1](upstream)[0]

    once = np.asarray(gradient(x.astype(np.float32), upstream.astype(np.float32))).astype(dtype)
    exact = by_hand(x, True, 1.0)
    exact *= upstream.astype(np.float64) - (exact * upstream.astype(np.float64)).sum(-1, keepdims=True)
    errors = [np.linalg.norm(np.asarray(got, np.float64) - exact) for got in (gradient(x, upstream), once)]
    assert errors[0] < 1.6 * errors[1]


@pytest.mark.parametrize("mask", [None, (5, 300)])
@by_dtype
def test_equal_cotangents_leave_no_gradient(dtype, mask, isa):
    """Softmax does not change where all logits change alike: not even by what its rounded results lack of a sum of 1."""
    x, *masks = softmax(dtype, (5, 300), mask).args
    upstream = np.full(x.shape, 1000, dtype)
    (dx,) = jax.vjp(lambda x: ops.softmax(x, *masks), x)[1](upstream)
    assert np.abs(np.asarray(dx, np.float32)).max() < 1e-3


def test_the_gradient_keeps_the_result_alone():
    """Not the logits: a program has one array of the size of the weights for each softmax."""

    def chain(x):
        for _ in range(4):
            x = ops.softmax(2 * x)
        return x.sum()

    x = jnp.ones((256, 1024))
    memory: Any = jax.jit(jax.grad(chain)).lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 6.5 * x.nbytes
