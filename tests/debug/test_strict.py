"""Checked mode's outputs: assignments that would broadcast or cast to a lesser type are errors, and all else is NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqxcallback as eqxc


def kernel_that(work):
    def kernel(ctx, out):
        work(out.numpy())

    return kernel


def run(work, dtype="float32", shape=(3, 4), checked=True, jit=False):
    f = eqxc.buffer_callback(kernel_that(work), jax.ShapeDtypeStruct(shape, dtype))
    if not checked:
        return (jax.jit(f) if jit else f)()
    with eqxc.debug.checked(), eqxc.raising():
        return jax.block_until_ready((jax.jit(f) if jit else f)())


def assign(index, value):
    def work(array):
        array[index] = value

    return work


def in_a_view(view, value):
    def work(array):
        view(array)[...] = value

    return work


ROW = np.zeros((1, 4), np.float32)


@pytest.mark.parametrize(
    ("work", "dtype", "expected", "got"),
    [
        (assign(..., ROW), "float32", "float32[3,4]", "float32[1,4]"),
        (assign(..., [0.0] * 4), "float32", "float32[3,4]", "float64[4]"),
        (assign(0, ROW), "float32", "float32[4]", "float32[1,4]"),
        (assign([0, 2], ROW), "float32", "float32[2,4]", "float32[1,4]"),
        (in_a_view(lambda array: array[1:], ROW), "float32", "float32[2,4]", "float32[1,4]"),
        (in_a_view(lambda array: array.T, np.zeros(3, np.float32)), "float32", "float32[4,3]", "float32[3]"),
        (
            in_a_view(lambda array: array.reshape(-1)[:6], np.zeros(1, np.float32)),
            "float32",
            "float32[6]",
            "float32[1]",
        ),
        (assign(..., 1.7), "int32", "int32[3,4]", "float64[]"),
        (assign(..., np.full((3, 4), 1.7)), "int32", "int32[3,4]", "float64[3,4]"),
        (assign((0, 0), np.float32(2)), "int8", "int8[]", "float32[]"),
        (assign(..., 1j), "float32", "float32[3,4]", "complex128[]"),
        (assign(..., np.zeros((3, 4), np.int8)), "uint8", "uint8[3,4]", "int8[3,4]"),
        (assign(..., np.zeros((3, 4), np.int8)), "bool", "bool[3,4]", "int8[3,4]"),
        (assign(..., 300), "uint8", "uint8[3,4]", "int64[]"),
        (assign(..., np.int64(-1)), "uint8", "uint8[3,4]", "int64[]"),
        (assign(..., 8), "int4", "int4[3,4]", "int64[]"),
        (assign(..., np.zeros((3, 4), np.float32)), "int4", "int4[3,4]", "float32[3,4]"),
        (assign(..., np.zeros((3, 4), np.complex64)), "bfloat16", "bfloat16[3,4]", "complex64[3,4]"),
        (assign(..., "7"), "float32", "float32[3,4]", "<U1[]"),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_an_assignment_that_numpy_would_make_silently(work, dtype, expected, got, jit):
    with pytest.raises(eqxc.KernelError) as caught:
        run(work, dtype, jit=jit)
    assert isinstance(caught.value.original, ValueError)
    assert str(caught.value.original) == (
        f"kernel_that.<locals>.kernel: expected {expected} in an assignment to an output; got {got}. Checked mode neither "
        "broadcasts nor casts to a lesser type: use np.broadcast_to or astype."
    )


def test_the_remedies_help():
    def work(array):
        array[...] = np.broadcast_to(ROW, array.shape)
        array[1] = np.full(4, 1.7).astype(np.int32)

    np.testing.assert_array_equal(run(work), [[0] * 4, [1] * 4, [0] * 4])


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float8_e4m3fn", "float4_e2m1fn", "int32", "uint8", "int4", "uint2", "complex64", "bool"],
)
def test_scalars_and_what_the_dtype_holds_are_fine(dtype):
    target = np.dtype(getattr(ml_dtypes, dtype, dtype))
    floats = [1.0, np.ones((3, 4)), np.float64(1)] if jnp.issubdtype(target, jnp.inexact) else []

    def work(array):
        assert array.dtype == target
        for value in (1, True, np.int64(1), np.ones((3, 4), target), np.ones((3, 4), bool), *floats):
            array[...] = value
            array[1:, 0] = np.asarray(array)[1:, 0]
            array[array == array] = np.ones(12, target)

    np.testing.assert_array_equal(run(work, dtype).astype(jnp.complex64), np.ones((3, 4)))


def test_the_rest_is_numpy():
    def work(array):
        assert isinstance(array, np.ndarray)
        array[...] = 1
        same = array
        same += np.ones(4, np.float32)  # broadcasts in sight of all
        assert same is array
        assert np.multiply(array, 2, out=array) is array
        np.matmul(np.ones((3, 2), np.float32), np.ones((2, 4), np.float32), out=array)
        computed, copied = array + 1, array.copy()
        for other in (computed, copied, copied[1:], array.astype(np.int32), np.asarray(array).copy()):
            other[...] = ROW  # memory of its own
        assert type(computed) is type(array.sum(axis=0)) is np.ndarray
        assert type(array.sum()) is np.float32
        np.asarray(array)[0] = ROW[0, :1]

    np.testing.assert_array_equal(run(work), [[0] * 4, [2] * 4, [2] * 4])


def test_what_cannot_be_seen():
    """`np.asarray(out)` is a plain array, by NumPy's own rule."""
    f = eqxc.buffer_callback(
        lambda ctx, out: np.asarray(out).__setitem__(..., ROW), jax.ShapeDtypeStruct((3, 4), jnp.float32)
    )
    with eqxc.debug.checked():
        np.testing.assert_array_equal(f(), np.zeros((3, 4)))


def test_only_in_checked_mode_and_only_outputs():
    def kernel(ctx, out, x):
        arrays.extend((type(out.numpy()), type(x.numpy()), type(np.asarray(out)), type(by_hand.numpy())))
        out.write(x)

    arrays, by_hand = [], eqxc.Buffer(np.zeros(3))
    numpy = eqxc.Buffer.numpy
    x = jnp.zeros(3)
    f = eqxc.buffer_callback(kernel, jax.ShapeDtypeStruct((3,), jnp.float32))
    f(x)
    assert arrays == [np.ndarray] * 4
    with eqxc.debug.checked():
        f(x)
        f(x)
    f(x)
    assert [kind is np.ndarray for kind in arrays[4:]] == [False, True, True, True] * 2 + [True] * 4
    assert eqxc.Buffer.numpy is numpy
    np.testing.assert_array_equal(run(assign(..., ROW), checked=False), np.zeros((3, 4)))


def test_each_kernel_is_named_inside_another():
    def inner(ctx, out):
        out.numpy()[...] = ROW

    def outer(ctx, out):
        with pytest.raises(eqxc.KernelError, match=r"ValueError: .*inner: expected float32\[3,4\]"):
            eqxc.buffer_callback(inner, jax.ShapeDtypeStruct((3, 4), jnp.float32))()
        out.numpy()[...] = ROW

    with eqxc.debug.checked(), pytest.raises(eqxc.KernelError, match=r"ValueError: .*outer: expected float32\[3,4\]"):
        eqxc.buffer_callback(outer, jax.ShapeDtypeStruct((3, 4), jnp.float32))()


def test_a_layer_is_named_by_its_class():
    class Row(eqxc.Layer):
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            out.numpy()[...] = ROW

        def out_type(self, x):
            return x

    with eqxc.debug.checked(), pytest.raises(eqxc.KernelError, match=r"Row: expected float32\[3,4\] in an assignment"):
        Row()(jnp.zeros((3, 4)))


def test_a_kept_strict_array_is_found():
    kept = []

    def work(array):
        array[...] = 0
        kept.append(array[1:])

    with pytest.raises(eqxc.KernelError, match="output 0 was kept past the call"):
        run(work)
