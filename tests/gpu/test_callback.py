"""The python lane on a real GPU. Run on such a machine with `python -m pytest -m gpu`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .conftest import require_gpu


pytestmark = pytest.mark.gpu


require_gpu()

import cupy  # noqa: E402


F32 = jax.ShapeDtypeStruct((1000,), jnp.float32)


def add_one(ctx, out, x):
    with ctx:
        cupy.add(x.cupy(), 1, out=out.cupy())


@pytest.fixture
def x():
    return jax.device_put(jnp.arange(1000.0), jax.devices("gpu")[0])


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("command_buffer_compatible", [False, True])
def test_cupy_on_the_stream_of_xla(x, jit, command_buffer_compatible):
    f = eqxc.buffer_callback(add_one, F32, command_buffer_compatible=command_buffer_compatible)
    f = jax.jit(lambda x, f=f: f(x * 2.0) * 2.0) if jit else f
    want = (np.arange(1000.0) * 2 + 1) * 2 if jit else np.arange(1000.0) + 1
    np.testing.assert_array_equal(f(x), want)


def test_zero_copy(x):
    seen = []

    def callback(ctx, out, x):
        seen.append((ctx.platform, ctx.device_ordinal, x.cupy().data.ptr, out.cupy().data.ptr))
        add_one(ctx, out, x)

    y = eqxc.buffer_callback(callback, F32)(x)
    assert seen == [("cuda", 0, x.unsafe_buffer_pointer(), y.unsafe_buffer_pointer())]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "bool"])
def test_dtypes(dtype):
    x = jax.device_put(jnp.ones(8, dtype), jax.devices("gpu")[0])

    def copy(ctx, out, x):
        assert x.cupy().dtype == x.dtype
        with ctx:
            out.cupy()[...] = x.cupy()

    np.testing.assert_array_equal(eqxc.buffer_callback(copy, jax.ShapeDtypeStruct(x.shape, x.dtype))(x), x)


def test_aliased_and_donated(x):
    def double(ctx, out, x):
        with ctx:
            out.cupy()[...] *= 2

    f = jax.jit(eqxc.buffer_callback(double, F32, input_output_aliases={0: 0}), donate_argnums=0)
    pointer = x.unsafe_buffer_pointer()
    y = f(x)
    assert y.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(y, np.arange(1000.0) * 2)


def test_errors(x):
    def broken(ctx, out, x):
        raise ValueError("no")

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"broken in jit\(.*\) failed; python lane"):
        jax.block_until_ready(jax.jit(eqxc.buffer_callback(broken, F32))(x))
    np.testing.assert_array_equal(eqxc.buffer_callback(add_one, F32)(x), np.arange(1000.0) + 1)


def test_a_captured_callback_runs_less_often_than_its_program(x):
    """XLA captures runs of at least five; it may record again when buffers move, so the count is not promised."""
    calls = []

    def counted(ctx, out, x):
        calls.append(None)
        add_one(ctx, out, x)

    f = eqxc.buffer_callback(counted, F32, command_buffer_compatible=True)

    @jax.jit
    def program(x):
        for _ in range(8):
            x = f(x)
        return x

    for _ in range(20):
        np.testing.assert_array_equal(program(x), np.arange(1000.0) + 8)
    assert len(calls) < 8 * 20
