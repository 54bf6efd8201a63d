"""Many calls of one op, in one program and in several that are alive: each one runs its own kernel, in its own form."""

import gc
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import ops
from eqxcallback.ops.norm import _reference as reference

from ..transform.library import SAXPY
from .layers import ScaleBackward, assert_close, mesh_of, normal, put, run


FACTORS = (2.0, 3.0, 5.0)


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def op_of(factor):
    def kernel(ctx, out, x):
        out.write(np.asarray(x) * np.float32(factor))

    return jax.vmap(eqxc.Op("multiply", {"cpu": eqxc.PythonKernel(kernel, like)}, vmap_method="sequential"))


def callback_of(factor):
    def kernel(ctx, out, x):
        out.write(np.asarray(x) * np.float32(factor))

    return eqxc.buffer_callback(kernel, jax.ShapeDtypeStruct((4, 3), jnp.float32), has_side_effect=True)


def layer_of(factor):
    class Multiply(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            out.write(np.asarray(x) * np.float32(factor))

        def out_type(self, x):
            return x

    return jax.vmap(Multiply())


class JaxLayer(eqxc.Layer):
    factor: float = eqx.field(static=True)
    kernels: ClassVar = {"cpu": eqxc.JaxKernel(lambda self, x: x * self.factor)}
    sharding = "n m -> n m"

    def reference(self, x):
        return x * self.factor


def jax_op_of(function):
    return eqxc.Op("multiply", {"cpu": eqxc.JaxKernel(function)}, reference=function, sharding="n m -> n m")


def of_array(factor):
    many = np.zeros(2000, np.float32)
    many[1000] = factor  # `repr` leaves the middle out
    return jax_op_of(lambda x: x * many[1000])


class Holder:
    def __init__(self, factor):
        self.factor = factor

    def times(self, x):
        return x * self.factor


@pytest.fixture
def x():
    return put(normal(4, 3), mesh_of(4), "a")


@pytest.mark.parametrize("make", [op_of, callback_of, layer_of])
def test_closures_of_one_function(make, x):
    """They are equal in all but what they hold. Each program calls its own, alone and beside the others."""
    functions = [make(factor) for factor in FACTORS]
    programs = [jax.jit(function) for function in functions]
    for _ in range(2):
        for factor, program in zip(FACTORS, programs, strict=True):
            np.testing.assert_allclose(program(x), factor * normal(4, 3), rtol=1e-6)
    for order in (slice(None), slice(None, None, -1)):
        together = jax.jit(lambda x, chosen=tuple(functions[order]): [function(x) for function in chosen])(x)
        for factor, value in zip(FACTORS[order], together, strict=True):
            np.testing.assert_allclose(value, factor * normal(4, 3), rtol=1e-6)
    # One that is made when its predecessor is gone may have its place.
    del functions, programs, together
    gc.collect()
    for factor in reversed(FACTORS):
        np.testing.assert_allclose(jax.jit(make(factor))(x), factor * normal(4, 3), rtol=1e-6)


@pytest.mark.parametrize(
    "make", [JaxLayer, of_array, lambda factor: jax_op_of(Holder(factor).times)], ids=["static", "array", "method"]
)
def test_calls_that_no_text_tells_apart(make, x):
    """A program names what it calls, for other processes. Two of one name are still two."""
    functions = [make(factor) for factor in FACTORS]
    for order in (slice(None), slice(None, None, -1)):
        together = jax.jit(lambda x, chosen=tuple(functions[order]): [function(x) for function in chosen])(x)
        for factor, value in zip(FACTORS[order], together, strict=True):
            np.testing.assert_allclose(value, factor * normal(4, 3), rtol=1e-6)
    programs = [jax.jit(function) for function in functions]
    for _ in range(2):
        for factor, program in zip(FACTORS, programs, strict=True):
            np.testing.assert_allclose(program(x), factor * normal(4, 3), rtol=1e-6)


def test_a_program_outlives_those_of_its_name(x):
    """The first one made the partition; the second one uses it after the first one is gone."""
    function = op_of(2.0)
    first = jax.jit(lambda x: function(x) + 1).lower(x).compile()
    second = jax.jit(lambda x: function(x) + 1).lower(x)
    del first
    gc.collect()
    np.testing.assert_allclose(second.compile()(x), 2 * normal(4, 3) + 1, rtol=1e-6)


SHAPES = [((4, 3), (3,), 0, None), ((4, 3), (4, 3), 0, 0), ((4, 5), (5,), 0, None), ((4, 2, 3), (3,), 0, None)]


def mapped(function, x, weight, axes):
    if np.ndim(x) == 3:
        return jax.vmap(jax.vmap(function, (0, None)), axes)(x, weight)
    return jax.vmap(function, axes)(x, weight)


@pytest.mark.parametrize("lane", ["native", "package", "python"])
def test_one_op_with_several_types_and_axes(lane):
    """In one program, and in programs that are alive together."""
    scale = eqxc.Op(
        "scale",
        {"cpu": eqxc.NativeKernel("ScaleRows", SAXPY)},
        lambda x, weight, *, shared: x * weight,
        vmap_method="broadcast_all",
    )
    call, plain = {
        "native": (lambda x, w: scale(x, w, shared=False), lambda x, w: x * w),
        "package": (lambda x, w: ops.rms_norm(x, w), lambda x, w: reference.rms_norm(x, jnp.asarray(w), eps=1e-5)),
        "python": (lambda x, w: ScaleBackward(w)(x), lambda x, w: jnp.tanh(x * w)),
    }[lane]
    mesh = mesh_of(4)
    operands = []
    for shape, weight_shape, _, axis in SHAPES:
        weight = normal(*weight_shape)
        operands.append((put(normal(*shape), mesh, "a"), put(weight, mesh, "a") if axis == 0 else weight))

    def all_of(function):
        def results(operands):
            return [
                mapped(function, x, w, axes)
                for (x, w), (*_, a, b) in zip(operands, SHAPES, strict=True)
                for axes in [(a, b)]
            ]

        return results

    whole = jax.tree.map(np.asarray, operands)
    assert_close(run(all_of(call), operands).values, all_of(plain)(whole))
    loss = lambda function: jax.grad(lambda operands: sum(jnp.sum(value**2) for value in all_of(function)(operands)))
    assert_close(run(loss(call), operands).values, loss(plain)(whole))
    programs = [
        jax.jit(lambda x, w, a=a, b=b: mapped(call, x, w, (a, b))).lower(*pair).compile()
        for pair, (*_, a, b) in zip(operands, SHAPES, strict=True)
    ]
    for program, pair, (*_, a, b) in zip(programs, operands, SHAPES, strict=True):
        x, weight = pair
        assert_close(program(x, weight), mapped(plain, np.asarray(x), np.asarray(weight), (a, b)))


def test_one_shape_with_several_meanings():
    """A vector for each row of a matrix, or a matrix for each vector: the same shapes throughout."""

    def kernel(ctx, out, x, y):
        x, y = np.asarray(x), np.asarray(y)
        out.write(x + 10 * (y.sum(-1, keepdims=True) if y.ndim > x.ndim else y))

    plain = lambda x, y: x + 10 * y
    mesh = mesh_of(4)
    x, y = put(normal(4, 4), mesh, "a"), put(normal(4, 4) + 1, mesh, "a")
    variants = [
        eqxc.Op("add", {"cpu": eqxc.PythonKernel(kernel)}, plain, vmap_method=batching)
        for batching in ("fold", "broadcast_all", "expand_dims")
    ]
    axes = [((0, 0), 0), ((0, 1), 0), ((1, 0), 0), ((1, 1), 1), ((0, 0), 1)]

    def all_of(functions):
        return lambda x, y: [jax.vmap(f, ins, outs)(x, y) for f in functions for ins, outs in axes]

    assert_close(run(all_of(variants), x, y).values, all_of([plain] * 3)(np.asarray(x), np.asarray(y)))


def test_attributes_of_native_kernels():
    saxpy = eqxc.Op(
        "saxpy", {"cpu": eqxc.NativeKernel("Saxpy", SAXPY)}, lambda x, y, *, a: a * x + y, vmap_method="broadcast_all"
    )
    x = put(normal(4, 3), mesh_of(4), "a")
    programs = [jax.jit(jax.vmap(lambda x, a=a: saxpy(x, x, a=a))).lower(x).compile() for a in FACTORS]
    for a, program in zip(FACTORS, programs, strict=True):
        np.testing.assert_allclose(program(x), (a + 1) * normal(4, 3), rtol=1e-6)
    for a, value in zip(
        FACTORS, jax.jit(lambda x: [jax.vmap(lambda x, a=a: saxpy(x, x, a=a))(x) for a in FACTORS])(x), strict=True
    ):
        np.testing.assert_allclose(value, (a + 1) * normal(4, 3), rtol=1e-6)
