"""`debug.checked`: what a kernel does wrong is found out."""

import ctypes
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc


X = jnp.arange(6.0).reshape(2, 3)


def run_checked(kernel, *args, result: jax.Array | jax.ShapeDtypeStruct = X, jit=False, **options):
    f = eqxc.buffer_callback(kernel, jax.ShapeDtypeStruct(result.shape, result.dtype), **options)
    with eqxc.debug.checked():
        return jax.block_until_ready((jax.jit(f) if jit else f)(*args))


@pytest.mark.parametrize("jit", [False, True])
def test_a_right_kernel_passes(jit):
    def kernel(ctx, out, x):
        np.multiply(x, np.float32(2), out=np.asarray(out))

    np.testing.assert_array_equal(run_checked(kernel, X, jit=jit), X * 2)


def test_trees_and_results_pass():
    def kernel(ctx, out, tree):
        out[0].write(tree["x"])
        out[1].write(np.asarray(tree["x"]).sum(1))

    f = eqxc.buffer_callback(
        kernel, [jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.float32)]
    )
    with eqxc.debug.checked():
        np.testing.assert_array_equal(f({"x": X})[1], X.sum(1))


@pytest.mark.parametrize("jit", [False, True])
def test_nothing_written(jit):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"6 of 6 elements were never written, the first at \(0, 0\)"):
        run_checked(lambda ctx, out, x: None, X, jit=jit)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "bool", "uint8", "float8_e4m3fn", "int4"])
def test_one_element_unwritten(dtype):
    result = jax.ShapeDtypeStruct((30, 10), dtype)

    def kernel(ctx, out):
        others = np.ones(out.shape, bool)
        others[17, 3] = False
        np.asarray(out)[others] = np.zeros((), out.dtype)

    with pytest.raises(
        eqxc.KernelError, match=r"output 0 .*1 of 300 elements were never written, the first at \(17, 3\)"
    ):
        run_checked(kernel, result=result)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float16", "int4", "bool"])
def test_values_that_look_like_noise_are_no_error(dtype):
    """All values of one byte occur in a large output: some equal the noise by chance."""
    result = jax.ShapeDtypeStruct((5000,), dtype)

    def kernel(ctx, out):
        out.write(np.arange(5000).astype(np.int8).astype(out.dtype))

    run_checked(kernel, result=result)


def test_an_aliased_output_need_not_be_written():
    def kernel(ctx, out, x):
        np.asarray(out)[0] += np.float32(1)

    y = run_checked(kernel, X, input_output_aliases={0: 0})
    np.testing.assert_array_equal(y, [[1, 2, 3], [3, 4, 5]])


def test_an_aliased_output_is_right_when_the_kernel_runs_twice():
    def kernel(ctx, out, x, y):
        np.asarray(out[0])[...] += np.float32(1)
        out[1].write(np.arange(5000).astype(np.int8))

    result = (jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((5000,), jnp.int8))
    with eqxc.debug.checked():
        out = eqxc.buffer_callback(kernel, result, input_output_aliases={0: 0})(X, X)
    np.testing.assert_array_equal(out[0], X + 1)


@pytest.mark.parametrize("jit", [False, True])
def test_an_aliased_sub_byte_output(jit):
    def increment(ctx, out, x):
        array = np.asarray(out)
        array[1] = array[1].astype(np.int8) + 1

    x = jnp.array([1, 2, 3], jnp.int4)
    y = run_checked(increment, x, result=x, jit=jit, input_output_aliases={0: 0})
    np.testing.assert_array_equal(y.astype(jnp.int8), [1, 3, 3])


def test_cycles_that_nobody_holds_are_no_kept_buffers():
    def kernel(ctx, out, x):
        a, b = np.asarray(out), np.asarray(x)

        def copy_row(i):
            if i < 2:
                a[i] = b[i]
                copy_row(i + 1)

        copy_row(0)

    np.testing.assert_array_equal(run_checked(kernel, X), X)


def test_a_changed_input():
    def kernel(ctx, out, x):
        ctypes.c_float.from_address(np.asarray(x).ctypes.data).value = 7.0
        out.write(x)

    with pytest.raises(eqxc.KernelError, match=r"input 0 .* was changed"):
        run_checked(kernel, X + 0)


def test_a_bool_that_is_none():
    result = jax.ShapeDtypeStruct((4,), jnp.bool_)

    def kernel(ctx, out):
        np.asarray(out).view(np.uint8)[...] = [0, 1, 2, 1]

    with pytest.raises(eqxc.KernelError, match="has bytes other than 0 and 1"):
        run_checked(kernel, result=result)


@pytest.mark.parametrize(
    ("keep", "dtype"),
    [
        *((lambda b: b, dtype) for dtype in ("float32", "int4")),
        *((np.asarray, dtype) for dtype in ("float32", "int4")),
        *((lambda b: np.asarray(b)[:1], dtype) for dtype in ("float32", "int4")),
        (np.from_dlpack, "float32"),
    ],
)
@pytest.mark.parametrize("which", ["input 0", "output 0"])
def test_a_kept_view(keep, which, dtype):
    x = X.astype(dtype)
    kept = []

    def kernel(ctx, out, x):
        out.write(x)
        kept.append(keep(x if which == "input 0" else out))

    with pytest.raises(eqxc.KernelError, match=f"{which} was kept past the call"):
        run_checked(kernel, x, result=x)


def test_a_kernels_own_error_is_not_hidden():
    def kernel(ctx, out, x):
        raise ValueError("mine")

    with pytest.raises(eqxc.KernelError, match="ValueError: mine"):
        run_checked(kernel, X)


def test_it_ends_with_the_context():
    def kernel(ctx, out, x):
        out.write(x)
        kept.append(x)

    kept = []
    f = eqxc.buffer_callback(kernel, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    with eqxc.debug.checked():
        with eqxc.debug.checked():
            pass
        with pytest.raises(eqxc.KernelError, match="was kept past the call"):
            f(X)
    f(X)


def test_the_environment_variable():
    code = (
        "import jax, jax.numpy as jnp, eqxcallback as eqxc\n"
        "f = eqxc.buffer_callback(lambda ctx, out: None, jax.ShapeDtypeStruct((2,), jnp.float32))\n"
        "try: f()\n"
        "except eqxc.KernelError as error: assert 'never written' in str(error)\n"
        "else: raise SystemExit('not checked')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "EQXCALLBACK_CHECKED": "1"})
