"""Norms, forward and backward, on a CPU."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import reference

from . import kernels
from .checking import SEEDS, check, normal, want, want_gradients
from .kernels import DTYPES, F32, results


EPS = 1e-5
# Less than a pack, odd, of one warp, of several, and more than stays in registers.
SHAPES = [(1, 1), (3, 7), (5, 64), (2, 1000), (9, 257), (3, 4096), (2, 9001)]


def rms_norm(x, *weight):
    return reference.rms_norm(x, *weight, eps=EPS)


def _normalized(x):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPS)


def layer_norm(x, weight, bias):
    return _normalized(x) * jnp.broadcast_to(weight, x.shape) + jnp.broadcast_to(bias, x.shape)


def layer_norm_weight(x, weight):
    return _normalized(x) * jnp.broadcast_to(weight, x.shape)


def layer_norm_bias(x, bias):
    return _normalized(x) + jnp.broadcast_to(bias, x.shape)


def layer_norm_plain(x):
    return _normalized(x)


DEFINITIONS: dict[str, tuple[Any, int]] = {
    "rms_norm": (rms_norm, 1),
    "rms_norm_plain": (rms_norm, 0),
    "layer_norm": (layer_norm, 2),
    "layer_norm_weight": (layer_norm_weight, 1),
    "layer_norm_bias": (layer_norm_bias, 1),
    "layer_norm_plain": (layer_norm_plain, 0),
}
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_name = pytest.mark.parametrize("name", DEFINITIONS)


def example(name, shape, dtype) -> tuple[Any, Any, list[Any]]:
    definition, count = DEFINITIONS[name]
    x = normal(1, shape, dtype) + np.asarray(0.5, dtype)
    return definition, x, [normal(2 + i, shape[-1:]) for i in range(count)]


@by_dtype
@by_name
@pytest.mark.parametrize("shape", [(3, 264), (2, 1001)], ids=str)
def test_forward(shape, name, dtype):
    definition, x, parameters = example(name, shape, dtype)
    (got,) = results(kernels.norm(name, x, *parameters))
    check(got, want(definition, x, *parameters), shape[-1])


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_of_any_size(shape, name):
    for dtype in DTYPES:
        definition, x, parameters = example(name, shape, dtype)
        expected = want(definition, x, *parameters)
        if shape == (1, 1) and name == "layer_norm":
            expected = parameters[1].reshape(shape)  # the reference divides rounding errors
        check(results(kernels.norm(name, x, *parameters), seed=3)[0], expected, shape[-1])


@by_dtype
@by_name
@pytest.mark.parametrize("shape", [(19, 40), (3, 1001)], ids=str)
def test_backward(shape, name, dtype):
    definition, x, parameters = example(name, shape, dtype)
    out, dout = np.full(shape, np.nan, dtype), normal(9, shape, dtype)  # out is not read
    got = results(kernels.norm_backward(name, x, *parameters, out=out, dout=dout))
    for mine, expected in zip(got, want_gradients(definition, dout, x, *parameters), strict=True):
        check(mine, expected, shape[-1] + shape[0], scale=16.0)


# The sums of 25,003 columns, or twice 12,800, are too large for shared memory.
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("rms_norm", shape) for shape in ((1, 5), (300, 33), (3, 4096), (2, 25_003))),
        *(("layer_norm", shape) for shape in ((700, 8), (2, 12_800))),
    ],
    ids=str,
)
def test_backward_of_any_size(shape, name):
    definition, x, parameters = example(name, shape, F32)
    dout = normal(9, shape)
    got = results(kernels.norm_backward(name, x, *parameters, out=dout, dout=dout), seed=5)
    for mine, expected in zip(got, want_gradients(definition, dout, x, *parameters), strict=True):
        check(mine, expected, shape[-1] + shape[0], scale=16.0)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_the_order_of_threads_does_not_matter(name):
    _, x, parameters = example(name, (7, 1000), F32)
    calls = kernels.norm(name, x, *parameters), kernels.norm_backward(name, x, *parameters, out=x, dout=x)
    for call in calls:
        first, *others = (results(call, seed) for seed in SEEDS)
        for other in others:
            assert [a.tobytes() for a in first] == [b.tobytes() for b in other]


@by_dtype
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_any_alignment_and_number_of_parts(name, dtype):
    definition, x, parameters = example(name, (19, 40), dtype)
    (got,) = results(kernels.norm(name, x, *parameters), misaligned=True)
    check(got, want(definition, x, *parameters), 40)
    call = kernels.norm_backward(name, x, *parameters, out=x, dout=x)
    (rows, size, _, eps), (first, second) = call.scalars, call.launches
    expected = want_gradients(definition, x, x, *parameters)
    for parts in (1, 3):
        launches = [dataclasses.replace(first, grid=(parts,)), second]
        other = dataclasses.replace(
            call, launches=launches, scalars=[rows, size, parts, eps], workspaces=[((parts, len(parameters), 40), F32)]
        )
        for mine, gradient in zip(results(other, misaligned=True), expected, strict=True):
            check(mine, gradient, 60, scale=16.0)


@by_name
def test_no_rows(name):
    _, x, parameters = example(name, (0, 40), F32)
    assert results(kernels.norm(name, x, *parameters))[0].shape == (0, 40)
    for gradient in results(kernels.norm_backward(name, x, *parameters, out=x, dout=x))[1:]:
        np.testing.assert_array_equal(gradient, np.zeros(40))


@by_dtype
def test_values_at_the_edges(dtype):
    big = 1e18 if dtype != np.float16 else 6e4
    x = normal(1, (6, 40), dtype)
    x[0], x[1] = big, 0
    x[2, 3], x[3, 5], x[4, 39] = np.nan, np.inf, -np.inf
    weight = np.ones(40, np.float32)
    check(results(kernels.norm("rms_norm", x, weight))[0], want(rms_norm, x, weight), 40)
    check(results(kernels.norm("layer_norm_weight", x, weight))[0][1:], want(layer_norm_weight, x, weight)[1:], 40)
