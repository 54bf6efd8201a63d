"""`Buffer` by index, what it says of operators, and gradients that are sums."""

import ctypes
import operator
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqxcallback as eqxc

from .fake_gpu import BF16, F32, OK, run_on_fake_gpu
from .kernels import address, callback_like


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def out_like(array, *, is_gradient=False):
    """An array of zeros, and a Buffer over it."""
    zeros = np.zeros_like(array)
    buffer = eqxc.Buffer(zeros)
    buffer._is_gradient = is_gradient
    return zeros, buffer


def test_in_a_kernel():
    def kernel(ctx, out, x):
        assert address(x[...]) == address(np.asarray(x))
        assert not x[...].flags.writeable
        out[...] = x[...] * 2

    x = jnp.asarray(X)
    for call in (callback_like(kernel, x), jax.jit(callback_like(kernel, x))):
        np.testing.assert_array_equal(call(x), X * 2)


def test_an_index_is_that_of_the_array():
    array, out = out_like(X)
    out[...] = X
    np.testing.assert_array_equal(array, X)
    assert out[1, 2] == 5
    assert out[:, 1].tolist() == [1, 4]
    assert np.shares_memory(out[0], array)
    out[0] = np.full(3, 7, np.float32)
    out[1, 1:] = X[0, 1:]
    out[:, 0] = np.array([8, 9], np.float32)
    out[X == 2] = np.array([6], np.float32)
    out[1, 2] = 0.5  # a number is an element
    assert array.tolist() == [[8, 7, 6], [9, 1, 0.5]]
    out[...] += 1
    assert array.tolist() == [[9, 8, 7], [10, 2, 1.5]]
    with pytest.raises(IndexError):
        out[2]


@pytest.mark.parametrize(
    ("index", "value", "types"),
    [
        (..., X[0], r"float32\[2,3\]; got float32\[3\]"),
        (..., X.astype(np.float64), r"float32\[2,3\]; got float64\[2,3\]"),
        (..., X[None], r"float32\[2,3\]; got float32\[1,2,3\]"),
        (..., 0.0, r"float32\[2,3\]; got float64\[\]"),
        ((...,), X[0], r"float32\[2,3\]; got float32\[3\]"),
        (slice(None), X[0], r"float32\[2,3\]; got float32\[3\]"),
        (0, X[0, 0], r"float32\[3\]; got float32\[\]"),
        (0, 1, r"float32\[3\]; got int64\[\]"),
        ((0, 0), "1", r"float32\[\]; got <U1\[\]"),
        ((0, 0), True, r"float32\[\]; got bool\[\]"),
    ],
)
def test_it_is_as_strict_as_write(index, value, types):
    array, out = out_like(X)
    with pytest.raises(ValueError, match=f"Buffer.__setitem__: expected {types}. Reshape or cast it first"):
        out[index] = value
    assert not array.any()


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"),
    [
        ("bool", (True,), (1, 1.0)),
        ("int8", (-3,), (True, 1.0)),
        ("int4", (-3,), (1.0,)),
        ("float32", (2, 0.5), (True, 1j)),
        ("bfloat16", (2, 0.5), (1j,)),
        ("complex64", (2, 0.5, 1j), (True,)),
    ],
)
def test_numbers(dtype, right, wrong):
    array, out = out_like(np.zeros((), getattr(ml_dtypes, dtype, dtype)))
    for value in right:
        out[...] = value
        assert array == np.asarray(value, array.dtype)
        out.write(value)
    for value in wrong:
        with pytest.raises(ValueError, match=rf"expected {dtype}\[\]; got"):
            out[...] = value


@pytest.mark.parametrize(
    ("dtype", "number"), [("int8", 300), ("uint8", -1), ("int4", 8), ("int4", -9), ("uint4", 16), ("int2", 2)]
)
def test_integers_out_of_bounds(dtype, number):
    array, out = out_like(np.zeros((), getattr(ml_dtypes, dtype, dtype)))
    with pytest.raises(OverflowError, match=f"{number} out of bounds for {dtype}"):
        out[...] = number
    assert array == 0


def test_inputs_are_read_only():
    x = eqxc.Buffer(X, writeable=False)
    with pytest.raises(
        ValueError, match=r"Buffer.__setitem__: this Buffer is an input, which is read-only. Write to `out`"
    ):
        x[...] = X
    with pytest.raises(ValueError, match="read-only"):
        x[...] += 1


def test_dead_buffers():
    kept = []
    callback_like(lambda ctx, out, x: (out.write(x), kept.append(out))[2:] or None, X)(X)
    for use in (lambda b: b[...], lambda b: operator.setitem(b, ..., X)):
        with pytest.raises(RuntimeError, match="Buffer used after its kernel returned"):
            use(kept[0])


# Operators.

BINARY = ["add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor"]
COMPARISONS = ["lt", "le", "gt", "ge", "eq", "ne"]


@pytest.mark.parametrize("name", [*BINARY, *COMPARISONS])
def test_operators_say_what_to_do(name):
    x, y = eqxc.Buffer(X), eqxc.Buffer(X)
    f = getattr(operator, name)
    for args in ((x, y), (x, 2), (2, x), (x, None), ([1.0], x)):
        with pytest.raises(
            TypeError, match=r"a Buffer is memory and computes nothing. .*numpy.asarray\(x\) or x\[...\]"
        ):
            f(*args)


@pytest.mark.parametrize("name", BINARY)
def test_operators_in_place_say_what_to_do(name):
    """`out += array` would be another array of the name."""
    x = eqxc.Buffer(X)
    f = getattr(operator, "i" + name.rstrip("_"), None) or getattr(operator, "i" + name)
    for other in (X, 2):
        with pytest.raises(TypeError, match=r"Write to it: `x\[...\] "):
            f(x, other)


@pytest.mark.parametrize("use", [operator.neg, operator.pos, abs, operator.invert, bool, list, iter, lambda x: [*x]])
def test_what_is_no_array_either(use):
    with pytest.raises(TypeError, match=r"x\[...\]"):
        use(eqxc.Buffer(X))


def test_arrays_compute_with_buffers():
    x, x_array = eqxc.Buffer(X), X.copy()
    np.testing.assert_array_equal(x_array * x, X * X)
    np.testing.assert_array_equal(x * x_array, X * X)
    scalar: Any = np.float32(2)  # no type checker believes it
    np.testing.assert_array_equal(scalar * x, 2 * X)
    np.testing.assert_array_equal(x - scalar, X - 2)
    np.testing.assert_array_equal(x_array > x, X > X)
    np.testing.assert_array_equal(x == x_array, X == X)
    np.testing.assert_array_equal(np.multiply(x, 2, out=np.empty_like(X)), 2 * X)
    np.testing.assert_array_equal(np.from_dlpack(x), X)
    np.testing.assert_array_equal(np.stack([x, x]), np.stack([X, X]))
    x_array += x
    np.testing.assert_array_equal(x_array, 2 * X)
    assert x in [x]
    assert {x: 1}[x] == 1


# Gradients.


def test_a_gradient_is_summed():
    array, grad = out_like(X, is_gradient=True)
    value = np.random.default_rng(0).standard_normal((5, 4, 2, 3)).astype(np.float32)
    grad.write(value)
    np.testing.assert_allclose(array, value.sum((0, 1)), rtol=1e-6)
    grad.write(X)
    np.testing.assert_array_equal(array, X)
    grad[...] = value[0]
    np.testing.assert_allclose(array, value[0].sum(0), rtol=1e-6)


def test_a_gradient_of_what_was_stretched():
    array, grad = out_like(np.zeros((1, 3, 1), np.float32), is_gradient=True)
    value = np.arange(2 * 5 * 3 * 4, dtype=np.float32).reshape(2, 5, 3, 4)
    grad.write(value)
    np.testing.assert_array_equal(array, value.sum((0, 1, 3)).reshape(1, 3, 1))


def test_sums_of_16_bits_are_rounded_once():
    for dtype in (np.float16, ml_dtypes.bfloat16):
        array, grad = out_like(np.zeros((), dtype), is_gradient=True)
        grad.write(np.full(4097, 1, dtype))
        assert array == np.asarray(4097, np.float32).astype(dtype)


@pytest.mark.parametrize(
    "value", [X[0], np.zeros((2, 4), np.float32), np.zeros((5, 2, 3)), np.zeros((2, 1), np.float32)]
)
def test_a_gradient_is_no_looser_otherwise(value):
    _, grad = out_like(X, is_gradient=True)
    with pytest.raises(ValueError, match=rf"expected float32\[2,3\]; got {value.dtype}"):
        grad.write(value)


def test_other_outputs_are_not_summed():
    _, out = out_like(X)
    with pytest.raises(ValueError, match=r"expected float32\[2,3\]; got float32\[5,2,3\]"):
        out.write(np.zeros((5, 2, 3), np.float32))


@pytest.mark.parametrize("method", ["fold", "expand_dims", "broadcast_all", "sequential"])
def test_gradients_of_a_layer(method):
    class Linear(eqxc.Layer):
        weight: jax.Array

        vmap_method = method

        def kernel(self, ctx, out, x):
            np.matmul(self.weight, x[..., None], out=out[..., None])

        def reference(self, x):
            return self.weight @ x

        def backward(self, ctx, grads, args, out, cotangents):
            (d_self, d_x), (x,) = grads, args
            if d_self.weight is not None:
                d_self.weight.write(cotangents[..., :, None] * x[..., None, :])
            if d_x is not None:
                d_x.write(np.einsum("...oi,...o->...i", self.weight, cotangents))

    layer, batch = Linear(jnp.asarray(X)), jnp.arange(12.0).reshape(4, 3)

    def loss(layer, x):
        return jnp.square(layer(x)).sum()

    def total(layer, batch, loss=loss):
        return jax.vmap(loss, (None, 0))(layer, batch).sum()

    want = jax.grad(lambda layer: jnp.square(batch @ layer.weight.T).sum())(layer).weight
    np.testing.assert_allclose(jax.grad(total)(layer, batch).weight, want, rtol=1e-6)
    per_example = jax.vmap(jax.grad(loss), (None, 0))(layer, batch).weight
    np.testing.assert_allclose(per_example.sum(0), want, rtol=1e-6)


# On a GPU, with a stand-in for CuPy over memory that is the host's.


class OnGpu(np.ndarray):
    __cuda_array_interface__ = None


@pytest.fixture
def cupy(monkeypatch):
    def ndarray(shape, dtype, pointer, strides):
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * pointer.nbytes).from_address(pointer.address))
        return np.lib.stride_tricks.as_strided(raw.view(dtype), shape, strides).view(OnGpu)

    module: object = types.SimpleNamespace(
        ndarray=ndarray,
        asarray=lambda value: np.asarray(value).view(OnGpu),
        cuda=types.SimpleNamespace(
            UnownedMemory=lambda address, nbytes, owner, device: types.SimpleNamespace(address=address, nbytes=nbytes),
            MemoryPointer=lambda memory, offset: memory,
            get_current_stream=lambda: types.SimpleNamespace(ptr=0xABC0),
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.parametrize(("dtype", "number"), [(np.float32, F32), (ml_dtypes.bfloat16, BF16)])
def test_on_a_gpu(fake_xla, cupy, dtype, number):
    def kernel(ctx, out, x):
        assert type(x[...]) is OnGpu
        out[...] = cupy.asarray(np.asarray(x[...]) * 2)
        out[0] = cupy.asarray(np.ones((), out.dtype))
        out[1] = 7.0
        for value in (np.zeros(3, out.dtype), 1.0):
            with pytest.raises(TypeError, match="expected an array in the memory of the GPU, where this Buffer is"):
                out.write(value)
        with pytest.raises(ValueError, match=r"expected .*\[3\]; got .*\[1,3\]"):
            out.write(x[None])
        with pytest.raises(TypeError, match="computes nothing"):
            _ = x * 2
        out[2:] = x[2:]

    code, message, out = run_on_fake_gpu(fake_xla, kernel, np.arange(3).astype(dtype), number)
    assert (code, message) == (OK, "")
    assert out.astype(np.float32).tolist() == [1, 7, 2]


def test_on_another_stream(fake_xla, cupy):
    def kernel(ctx, out, x):
        for use in (lambda: x[...], lambda: out.write(x), lambda: operator.setitem(out, ..., x)):
            with pytest.raises(ValueError, match=r"CuPy works on another stream than XLA. Do it inside of `with ctx:`"):
                use()

    assert run_on_fake_gpu(fake_xla, kernel, X[0].copy(), F32, stream=0xDEF0)[0] == OK


def test_without_cupy(fake_xla, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)

    def kernel(ctx, out, x):
        for use in (lambda: x[...], lambda: out.write(X[0])):
            with pytest.raises(ImportError, match="CuPy cannot be imported"):
                use()

    assert run_on_fake_gpu(fake_xla, kernel, X[0].copy(), F32)[0] == OK
