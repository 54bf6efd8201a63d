"""Idioms around an op, a layer and a tap: all of them do what they do around the plain function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .idioms import IDIOMS, NUMBERS, W, X


def plain(x, w):
    return x * jax.nn.sigmoid(x) * w


def kernel(ctx, out, x, w):
    x, w = (np.asarray(a, np.float64) for a in (x, w))
    np.asarray(out)[...] = (x / (1 + np.exp(-x)) * w).astype(out.dtype)


def backward(ctx, grads, args, out, cotangents):
    x, w, ct = (np.asarray(a, np.float64) for a in (*args, cotangents))
    gate = 1 / (1 + np.exp(-x))
    for grad, value in zip(grads, (ct * w * gate * (1 + x * (1 - gate)), ct * x * gate), strict=True):
        if grad is not None:
            grad_array = np.asarray(grad)
            grad_array[...] = value.sum(tuple(range(value.ndim - grad_array.ndim))).astype(grad.dtype)


class Gate(eqxc.Layer):
    vmap_method = "broadcast_all"

    def kernel(self, ctx, out, x, w):
        kernel(ctx, out, x, w)

    def reference(self, x, w):
        return plain(x, w)

    def backward(self, ctx, grads, args, out, cotangents):
        backward(ctx, grads[1:], args, out, cotangents)


class EachExample(eqxc.Layer):
    vmap_method = "sequential"

    def kernel(self, ctx, out, x, w):
        kernel(ctx, out, x, w)

    def reference(self, x, w):
        return plain(x, w)


OP = eqxc.Op(
    "gate",
    {"cpu": eqxc.PythonKernel(kernel)},
    plain,
    vmap_method="broadcast_all",
    backward=eqxc.PythonKernel(backward),
)


def tapped(x, w):
    x, w = eqxc.debug.tap(lambda values, transforms: None, (x, w))
    return eqxc.debug.tap(lambda value, transforms: None, plain(x, w))


SUBJECTS = {"op": OP, "layer": Gate(), "each": EachExample(), "native": eqxc.ops.swiglu, "tap": tapped}


@functools.cache
def wanted(name):
    return (IDIOMS | NUMBERS)[name](plain)


def assert_alike(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.shape(g) == jnp.shape(w)
        assert jnp.result_type(g) == jnp.result_type(w)
        tolerance = 3e-2 if jnp.result_type(g) in (jnp.bfloat16, jnp.float16) else 1e-5
        np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", IDIOMS)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_idiom(subject, name):
    assert_alike(IDIOMS[name](SUBJECTS[subject]), wanted(name))
    jax.effects_barrier()


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("subject", [name for name in SUBJECTS if name != "native"])
def test_numbers(subject, name):
    assert_alike(NUMBERS[name](SUBJECTS[subject]), wanted(name))
    jax.effects_barrier()


@pytest.mark.parametrize("method", ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all"])
def test_numbers_beside_mapped_operands_of_a_callback(method):
    callback = eqxc.buffer_callback(kernel, jax.ShapeDtypeStruct((), jnp.float32), vmap_method=method)
    for number in (2.0, np.float32(2)):
        assert_alike(jax.vmap(lambda x, number=number: callback(x, number))(X), plain(X, np.float32(2)))
        assert_alike(jax.jit(jax.vmap(callback, (None, 0)))(number, W), plain(np.float32(2), W))


@pytest.mark.parametrize("method", ["fold", "sequential", "expand_dims", "broadcast_all", {"x": "broadcast_all"}])
@pytest.mark.parametrize("takes", [True, False])
def test_bools_beside_mapped_operands(method, takes):
    def body(ctx, out, x, flag):
        np.asarray(out)[...] = np.where(np.asarray(flag), np.asarray(x), 0)

    op = eqxc.Op("pick", {"cpu": eqxc.PythonKernel(body)}, lambda x, flag: jnp.where(flag, x, 0.0), method)
    assert_alike(jax.vmap(lambda x: op(x, takes))(X), X * np.float32(takes))
    assert_alike(
        jax.vmap(jax.vmap(op, (0, None)), (None, 0))(X, np.array([takes, True])), jnp.stack([X * np.float32(takes), X])
    )
    assert_alike(jax.grad(lambda x: op(x, takes))(2.0), jnp.float32(takes))
