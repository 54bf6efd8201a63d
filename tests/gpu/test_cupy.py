"""CuPy in the python lane on a real GPU: what it computes, the stream, and what `check` says of a recorded call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.testing import CheckFailed, check

from .conftest import require_gpu


pytestmark = pytest.mark.gpu

require_gpu()

import cupy  # noqa: E402


SOURCE = r"""
extern "C" __global__ void scale(const float* x, float* y, float factor, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}
"""
scale = cupy.RawKernel(SOURCE, "scale")
twice = cupy.ElementwiseKernel("T x", "T y", "y = (T)(2.0f * (float)x)", "eqxcallback_twice")


class Twice(eqxc.Layer):
    vmap_method = "fold"
    command_buffer_compatible = True

    def kernel(self, ctx, out, x):
        with ctx:
            self.launch(ctx, out.cupy(), x.cupy())

    def launch(self, ctx, y, x):
        cupy.multiply(x, 2, out=y)

    def reference(self, x):
        return x * 2


class TwiceRaw(Twice):
    def launch(self, ctx, y, x):
        if x.size:
            blocks = (x.size + 255) // 256
            scale((blocks,), (256,), (x, y, np.float32(2), np.int32(x.size)))


class TwiceElementwise(Twice):
    def launch(self, ctx, y, x):
        twice(x, y)


RIGHT = [Twice, TwiceRaw, TwiceElementwise]


@pytest.fixture
def x():
    return jax.device_put(jnp.arange(1000.0), jax.devices("gpu")[0])


def named(cases):
    return pytest.mark.parametrize("layer", cases, ids=lambda cls: cls.__name__)


@named(RIGHT)
@pytest.mark.parametrize("jit", [False, True])
def test_values(x, layer, jit):
    call = jax.jit(layer()) if jit else layer()
    for _ in range(3):
        np.testing.assert_array_equal(call(x), np.arange(1000.0) * 2)


@named(RIGHT)
def test_between_kernels_of_xla(layer):
    """XLA computes the operand right before, and uses the result right after: no time to be on another stream."""
    x, weight = (
        jax.random.normal(jax.random.key(i), (512, 512)) / 1024**0.5 for i in (0, 1)
    )  # a small error stays one

    def program(x, call):
        for _ in range(4):
            x = call(jnp.tanh(x @ weight))
        return jnp.sin(x)

    with jax.default_matmul_precision("highest"):  # else one product may be in TF32 and the other not
        got = jax.jit(lambda x: program(x, layer()))(x)
        want = jax.jit(lambda x: program(x, lambda x: 2 * x))(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int32", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e5m2"]
)
def test_dtypes(dtype):
    x = jax.device_put(jnp.arange(8).astype(dtype), jax.devices("gpu")[0])

    def copy(ctx, out, x):
        with ctx:
            source, target = x.cupy(), out.cupy()
            assert source.dtype == target.dtype == x.dtype
            target.view(cupy.uint8)[...] = source.view(cupy.uint8)

    got = eqxc.buffer_callback(copy, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(x))


def test_a_kernel_in_bfloat16():
    x = jnp.linspace(-3, 3, 100, dtype=jnp.bfloat16)
    got = jax.jit(TwiceElementwise())(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got), np.asarray(2 * x))


def test_column_major():
    class Transposed(Twice):
        input_layouts = ((1, 0),)
        output_layouts = ((1, 0),)

        def launch(self, ctx, y, x):
            assert x.flags.f_contiguous
            assert y.flags.f_contiguous
            super().launch(ctx, y, x)

    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.jit(Transposed())(x), 2 * x)


@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_small_shapes(shape):
    x = jnp.ones(shape)
    np.testing.assert_array_equal(jax.jit(Twice())(x), 2 * x)


def test_the_stream_is_entered_and_left(x):
    seen = []

    def callback(ctx, out, x):
        before = cupy.cuda.get_current_stream().ptr
        with ctx:
            seen.append((cupy.cuda.get_current_stream().ptr, cupy.cuda.Device().id, ctx.cupy_stream().ptr))
            with ctx:
                twice(x.cupy(), out.cupy())
            assert cupy.cuda.get_current_stream().ptr == ctx.stream
        assert cupy.cuda.get_current_stream().ptr == before
        with pytest.raises(ValueError, match="no"), ctx:
            raise ValueError("no")
        assert cupy.cuda.get_current_stream().ptr == before
        assert seen[-1] == (ctx.stream, ctx.device_ordinal, ctx.stream)

    got = eqxc.buffer_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    np.testing.assert_array_equal(got, 2 * np.arange(1000.0))
    assert len(seen) == 1


@named(RIGHT)
def test_in_a_command_buffer(x, layer):
    """Recorded, and right in each replay, with other values at the same place and with other places."""
    call = layer()
    call(x)  # CuPy compiles
    program = eqxc.jit_captured(lambda x: call(call(call(x))))
    for i in range(10):
        other = x + i
        np.testing.assert_array_equal(program(other), 8 * np.asarray(other))


# What `check` says of a recorded call.


@named(RIGHT)
def test_what_can_be_recorded(layer):
    report = check(layer(), jnp.arange(8.0), only="capture")
    assert report["capture"].result == "ok"
    assert report["capture"].detail.startswith("recorded ")


def test_every_row():
    check(Twice(), jnp.arange(8.0), capture=True)


class OutsideOfTheStream(Twice):
    def kernel(self, ctx, out, x):
        cupy.multiply(x.cupy(), 2, out=out.cupy())


class OnItsOwnStream(Twice):
    def launch(self, ctx, y, x):
        with cupy.cuda.Stream(non_blocking=True):
            cupy.multiply(x, 2, out=y)


class PartlyOnItsOwnStream(Twice):
    def launch(self, ctx, y, x):
        cupy.multiply(x[..., :4], 2, out=y[..., :4])
        with cupy.cuda.Stream(non_blocking=True):
            cupy.multiply(x[..., 4:], 2, out=y[..., 4:])


class Allocates(Twice):
    def launch(self, ctx, y, x):
        y[...] = x * 2


class AllocatesFromTheDriver(Twice):
    def launch(self, ctx, y, x):
        cupy.cuda.runtime.free(cupy.cuda.runtime.malloc(512))
        super().launch(ctx, y, x)


class AllocatesOnTheStream(Twice):
    def launch(self, ctx, y, x):
        super().launch(ctx, y, x)
        cupy.cuda.runtime.mallocAsync(512, ctx.stream)


class Waits(Twice):
    def launch(self, ctx, y, x):
        super().launch(ctx, y, x)
        cupy.cuda.get_current_stream().synchronize()


class WaitsForTheDevice(Twice):
    def launch(self, ctx, y, x):
        super().launch(ctx, y, x)
        cupy.cuda.Device().synchronize()


class Reads(Twice):
    def launch(self, ctx, y, x):
        super().launch(ctx, y, x)
        x.get()


class Raises(Twice):
    def kernel(self, ctx, out, x):
        super().kernel(ctx, out, x)
        np.asarray(x)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (OutsideOfTheStream, "launches on CUDA's default stream"),
        (OnItsOwnStream, "launches nothing on ctx.stream"),
        (PartlyOnItsOwnStream, "a replay of what was recorded, against the call"),
        (Allocates, "allocates"),
        (AllocatesFromTheDriver, "allocates"),
        (AllocatesOnTheStream, "allocates on its stream"),
        (Waits, "waits for the GPU"),
        (WaitsForTheDevice, "waits for the GPU"),
        (Reads, "reads values on the host"),
        (Raises, "in the memory of a cuda device"),
    ],
    ids=lambda it: it.__name__ if isinstance(it, type) else "",
)
def test_a_sin_is_named(layer, said):
    with pytest.raises(CheckFailed) as caught:
        check(layer(), jnp.arange(8.0), only="capture")
    assert said in caught.value.report["capture"].detail


def test_a_refused_capture_leaves_nothing_behind(x):
    for _ in range(3):
        with pytest.raises(CheckFailed):
            check(Waits(), jnp.arange(8.0), only="capture")
    np.testing.assert_array_equal(jax.jit(Twice())(x), 2 * np.arange(1000.0))
    cupy.cuda.Device().synchronize()


def test_a_kernel_that_is_not_declared():
    class Undeclared(Waits):
        command_buffer_compatible = False

    assert check(Undeclared(), jnp.arange(8.0), only="capture")["capture"].result == "not applicable"
