"""Plain C functions as kernels: what they get, and that what they write arrives."""

import ctypes
import dataclasses
import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import CKernel, Op

from . import library
from .library import kernel, saxpy, saxpy_reference


F32, F64, I64 = jnp.float32, jnp.float64, jnp.int64


def op_of(kernel, out_type, **more):
    function = dataclasses.replace(kernel, out_type=out_type)
    return Op(kernel.symbol, kernels={"cpu": function}, **more)


def struct(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_operands_results_sizes_and_options():
    op = Op("saxpy", kernels={"cpu": saxpy()}, reference=saxpy_reference)
    x, y = jnp.arange(6.0), jnp.ones(6)
    np.testing.assert_array_equal(op(x, y, a=2.0), 2 * x + y)
    np.testing.assert_array_equal(jax.jit(lambda x, y: op(x, y, a=2.0))(x, y), 2 * x + y)
    np.testing.assert_array_equal(y, np.ones(6))  # a copy is overwritten


def test_a_donated_operand_is_overwritten():
    op = Op("saxpy", kernels={"cpu": saxpy()}, reference=saxpy_reference)
    step = jax.jit(lambda y, x: op(x, y, a=2.0), donate_argnums=0)
    text = str(eqxc.inspect(step, jnp.ones(6), jnp.ones(6)))
    assert "operand 1 -> result 0: in place" in text
    assert "native" in text


VALUES = (-100, 1.5, 60_000, 2.25, -2_000_000_000, 0.1, 2**62 + 1, 1e300, True, -3.5, 200, 1 / 3, None, 6.5)
VALUES += (2**63 + 2**62, -7.25, math.pi, 1e-30, -30_000, 4_000_000_000, 8.5)
TYPES = ["int8_t", "double", "uint16_t", "float", "int32_t", "float", "int64_t", "double", "bool", "float", "uint8_t"]
TYPES += ["double", "const float *", "float", "uint64_t", "double", "double", "float", "int16_t", "uint32_t", "float"]


def test_more_parameters_than_registers():
    """Each in its place and with its sign, of integers and of floating numbers, in registers and on the stack."""
    parameters = [
        f"{ctype} x" if value is None else f"{ctype} {value!r}" if value is not True else f"{ctype} flag"
        for ctype, value in zip(TYPES, VALUES, strict=True)
    ]
    with jax.enable_x64(True):
        function = kernel("every_parameter", *parameters, "double* out", scalars={"flag": lambda x: True})
        out = op_of(function, lambda x: struct(len(VALUES) - 1, dtype=F64))(jnp.full(1, 0.75, F32))
    expected = [0.75 if value is None else value for value in VALUES]
    expected = [np.float32(value) if ctype == "float" else value for ctype, value in zip(TYPES, expected, strict=True)]
    np.testing.assert_array_equal(out, np.array(expected[: len(out)], np.float64))


def test_sizes_of_arrays():
    with jax.enable_x64(True):
        function = kernel(
            "sizes", "x.size", "int32_t x.ndim", "x.shape[0]", "int x.shape[-1]", "size_t x.strides[ 0 ]", "out"
        )
        out = op_of(function, lambda x: struct(5, dtype=I64))(jnp.ones((2, 3, 5)))
    assert out.tolist() == [30, 3, 2, 5, 15]


def test_numbers_that_a_function_says():
    with jax.enable_x64(True):
        function = kernel(
            "sizes",
            *("twice", "int32_t 7", "k", "int k", "size_t 9"),
            "int64_t out[]",
            scalars={"twice": lambda x, *, k: 2 * x.size},
        )
        out = op_of(function, lambda x, *, k: struct(5, dtype=I64))(jnp.ones((2, 3)), k=-4)
    assert out.tolist() == [12, 7, -4, -4, 9]


def test_a_workspace():
    function = kernel("cumulate", "x.size", "x", "float* workspace[0]", "out", workspaces=lambda x: [x])
    out = op_of(function, lambda x: x)(jnp.arange(5.0))
    assert out.tolist() == [0, 1, 3, 6, 10]


def test_types_that_c_has_no_names_for():
    x = jnp.array([1.5, -2.0, 1e30])
    to_bf16 = op_of(kernel("to_bf16", "x.size", "x", "uint16_t* out"), lambda x: struct(*x.shape, dtype=jnp.bfloat16))
    np.testing.assert_array_equal(to_bf16(x)[:2], x[:2])
    with jax.enable_x64(True):
        z = jnp.array([1 + 2j, -3j])
        conjugate = kernel("conjugate", "x.size", "const double complex* x", "double _Complex *out")
        np.testing.assert_array_equal(op_of(conjugate, lambda x: x)(z), z.conj())


def test_an_argument_that_is_absent_is_null():
    op = op_of(kernel("scale", "x.size", "x", "const float* weight", "out"), lambda x, weight: x)
    assert op(jnp.ones(3), None).tolist() == [1, 1, 1]
    assert op(jnp.ones(3), jnp.full(1, 4.0)).tolist() == [4, 4, 4]


def test_a_function_without_parameters():
    op = op_of(kernel("nothing"), lambda x: x)
    assert op(jnp.ones(3)).shape == (3,)


def test_an_address():
    loaded = ctypes.CDLL(str(library.path()))
    address = ctypes.cast(loaded.saxpy, ctypes.c_void_p).value
    function = CKernel("saxpy", address=address, parameters=library.SAXPY, aliases={"y": 0})
    op = Op("saxpy", kernels={"cpu": function}, reference=saxpy_reference)
    assert op(jnp.ones(3), jnp.ones(3), a=4.0).tolist() == [5, 5, 5]


def test_two_functions_at_a_time():
    """Each call knows its own, on whatever thread."""
    add = Op("saxpy", kernels={"cpu": saxpy()}, reference=saxpy_reference)
    scale = op_of(kernel("scale", "x.size", "x", "weight", "out"), lambda x, weight: x)

    @jax.jit
    def both(x):
        for _ in range(20):
            x = jnp.where(x.sum() > 0, add(x, x, a=1.0), 0) + scale(x, jnp.full(1, -1.0))
        return x

    np.testing.assert_array_equal(both(jnp.ones(1000)), np.ones(1000))


class Scale(eqxc.Layer):
    weight: jax.Array
    factor: float = eqx.field(static=True, default=2.0)
    kernels: ClassVar = {"cpu": kernel("saxpy", "x.size", "float factor", "x", "out", aliases={"self.weight": 0})}

    def reference(self, x):
        return self.factor * x + self.weight


def test_a_layer_has_names_of_its_leaves():
    layer = Scale(jnp.ones(4))
    np.testing.assert_array_equal(layer(jnp.arange(4.0)), [1, 3, 5, 7])


def test_the_availability():
    assert eqxc.available_backends()["c"] is True


@pytest.mark.parametrize("implementation", ["c", "auto"])
def test_the_implementation(implementation):
    op = Op("saxpy", kernels={"cpu": saxpy()}, reference=saxpy_reference, implementation=implementation)
    assert op(jnp.ones(2), jnp.ones(2), a=1.0).tolist() == [2, 2]
