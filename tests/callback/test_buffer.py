"""`Buffer` and `ExecutionContext`: what a callback gets in its hands."""

import copy
import gc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqxcallback as eqxc

from .kernels import address, callback_like


def inside(callback, *args, out=None):
    """Run `callback(ctx, out, *args)` on real buffers and return what it returned."""
    returned = []

    def wrapper(ctx, out, *args):
        np.asarray(out)[...] = 0
        returned.append(callback(ctx, out, *args))

    result = jax.ShapeDtypeStruct((1,), jnp.float32) if out is None else out
    jax.block_until_ready(eqxc.buffer_callback(wrapper, result)(*args))
    return returned[0]


def test_attributes():
    x = jnp.zeros((2, 3, 4), jnp.int16)

    def attributes(ctx, out, x):
        return [(b.shape, b.dtype, b.ndim, b.size, b.nbytes, b.strides, b.writeable) for b in (x, out)]

    got_x, got_out = inside(attributes, x, out=jax.ShapeDtypeStruct((), jnp.float32))
    assert got_x == ((2, 3, 4), np.dtype(np.int16), 3, 24, 48, (24, 8, 2), False)
    assert got_out == ((), np.dtype(np.float32), 0, 1, 4, (), True)


def test_repr():
    x = jnp.zeros((2, 3), jnp.bfloat16)
    texts = inside(lambda ctx, out, x: (repr(x), repr(out), repr(ctx)), x)
    assert texts == (
        "Buffer(shape=(2, 3), dtype=bfloat16, platform=cpu, writeable=False)",
        "Buffer(shape=(1,), dtype=float32, platform=cpu, writeable=True)",
        "ExecutionContext(platform=cpu, device_ordinal=0, stream=None)",
    )


def test_context():
    ctx = inside(lambda ctx, out: (ctx.stage, ctx.stream, ctx.device_ordinal, ctx.platform))
    assert ctx == (eqxc.ExecutionStage.EXECUTE, None, 0, "cpu")


def test_device_ordinal_is_that_of_the_device():
    for ordinal, device in enumerate(jax.devices("cpu")[:4]):
        x = jax.device_put(jnp.zeros(1), device)
        assert inside(lambda ctx, out, x: ctx.device_ordinal, x) == ordinal


def test_zero_copy_in():
    x = jnp.arange(1000.0)
    assert inside(lambda ctx, out, x: address(np.asarray(x)), x) == address(x)


def test_zero_copy_out():
    x = jnp.arange(1000.0)
    seen = []

    def callback(ctx, out, x):
        seen.append(address(np.asarray(out)))
        out.write(x)

    y = callback_like(callback, x)(x)
    assert seen == [address(y)]
    y = jax.jit(callback_like(callback, x))(x)
    assert seen[1] == address(y)


def test_inputs_are_read_only():
    x = jnp.arange(4.0)

    def callback(ctx, out, x):
        for view in (np.asarray(x), x.numpy(), np.from_dlpack(x)):
            with pytest.raises(ValueError, match="read-only"):
                view[...] = 7
        with pytest.raises(ValueError, match="this Buffer is an input, which is read-only"):
            x.write(np.zeros(4, np.float32))
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            np.asarray(x).flags.writeable = True

    inside(callback, x)
    np.testing.assert_array_equal(x, np.arange(4.0, dtype=np.float32))


def test_constants_of_a_program_survive():
    constant = np.arange(4.0, dtype=np.float32)

    def callback(ctx, out, x):
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(x)[...] = 7
        out.write(x)

    f = callback_like(callback, constant)
    np.testing.assert_array_equal(jax.jit(lambda: f(constant))(), constant)
    np.testing.assert_array_equal(f(constant), constant)
    np.testing.assert_array_equal(constant, np.arange(4.0))


def test_array_protocol():
    x = jnp.arange(3, dtype=jnp.int32)

    def callback(ctx, out, x):
        view = np.asarray(x)
        assert address(view) == address(np.asarray(x))
        assert np.asarray(x, copy=False).base is x
        copied = np.array(x)
        assert address(copied) != address(view)
        assert copied.flags.writeable
        assert np.asarray(x, dtype=np.float64).dtype == np.float64
        assert np.asarray(x, dtype=np.int32).base is x
        with pytest.raises(ValueError, match="change of dtype needs a copy"):
            np.asarray(x, dtype=np.float64, copy=False)
        np.testing.assert_array_equal(copied, [0, 1, 2])
        assert np.sum(x) == 3

    inside(callback, x)


def test_jax_arrays_of_a_buffer():
    """`jnp.asarray(buffer)` raises with JAX's own buffers, because they claim to be on a GPU."""

    def callback(ctx, out, x):
        assert not hasattr(x, "__cuda_array_interface__")
        out.write(np.asarray(jax.block_until_ready(jnp.array(x) * 2.0)))

    x = jnp.arange(3.0)
    np.testing.assert_array_equal(callback_like(callback, x)(x), [0.0, 2.0, 4.0])


def test_dlpack():
    x = jnp.arange(6.0).reshape(2, 3)

    def callback(ctx, out, x):
        assert x.__dlpack_device__() == (1, 0)
        view = np.from_dlpack(x)
        assert address(view) == address(np.asarray(x))
        np.testing.assert_array_equal(view, np.asarray(x))
        assert not view.flags.writeable
        result = np.from_dlpack(out)
        assert result.flags.writeable
        result[...] = view
        copied = np.from_dlpack(x, copy=True)
        assert address(copied) != address(view)
        np.testing.assert_array_equal(copied, view)
        with pytest.raises(BufferError, match="dl_device is another device"):
            x.__dlpack__(dl_device=(2, 0))
        with pytest.raises(TypeError, match="unexpected keyword argument bogus"):
            x.__dlpack__(bogus=1)
        assert "dltensor_versioned" in repr(x.__dlpack__(max_version=(1, 0)))
        assert '"dltensor"' in repr(out.__dlpack__())
        with pytest.raises(BufferError, match=r"read-only, which DLPack can say from version 1.0 on"):
            x.__dlpack__()

    np.testing.assert_array_equal(callback_like(callback, x)(x), x)


def test_no_cuda_interface_on_cpu():
    def callback(ctx, out):
        assert not hasattr(out, "__cuda_array_interface__")
        with pytest.raises(TypeError, match=r"in the memory of a CPU. Use buffer.numpy\(\)"):
            out.cupy()

    inside(callback)


def test_torch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: it is not a dependency of ours")
    x = jnp.arange(4.0).astype(jnp.bfloat16)

    def callback(ctx, out, x):
        tensor = out.torch()
        assert tensor.dtype == torch.bfloat16
        assert tensor.data_ptr() == address(np.asarray(out))
        tensor.copy_(x.torch() + 1)

    np.testing.assert_array_equal(callback_like(callback, x)(x), np.asarray(x) + np.ones((), x.dtype))


def test_write_is_strict():
    def callback(ctx, out):
        for value, got in (
            (np.zeros((1, 4), np.float32), r"float32\[1,4\]"),
            (np.zeros((3, 4), np.float64), r"float64\[3,4\]"),
            (1.7, r"float64\[\]"),
        ):
            with pytest.raises(ValueError, match=rf"expected float32\[3,4\]; got {got}. Reshape or cast it first"):
                out.write(value)
        out.write(np.ones((3, 4), np.float32))

    out = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    np.testing.assert_array_equal(eqxc.buffer_callback(callback, out)(), np.ones((3, 4)))


@pytest.mark.parametrize(
    "use",
    [
        lambda b: b.shape,
        lambda b: b.dtype,
        lambda b: b.nbytes,
        lambda b: b.writeable,
        np.asarray,
        np.from_dlpack,
        lambda b: b.numpy(),
        lambda b: b.write(1),
        lambda b: b.__dlpack_device__(),
        lambda b: b.__cuda_array_interface__,
    ],
)
def test_buffers_are_dead_after_the_call(use):
    kept = inside(lambda ctx, out, x: (out, x), jnp.zeros(3))
    for buffer in kept:
        with pytest.raises(RuntimeError, match="Buffer used after its kernel returned"):
            use(buffer)
        assert repr(buffer) == "Buffer(<its kernel has returned>)"


def test_a_kept_buffer_is_not_lent_again():
    """Calls reuse Buffer objects, but never one that somebody else can see."""
    kept = []

    def callback(ctx, out, x):
        kept.append(x)
        out.write(x)

    f = callback_like(callback, jnp.zeros(3))
    for i in range(4):
        np.testing.assert_array_equal(f(jnp.full(3, float(i))), np.full(3, float(i)))
    assert len({id(buffer) for buffer in kept}) == 4


def test_shapes_of_reused_buffers_change():
    shapes = []

    def callback(ctx, out, x):
        shapes.append((x.shape, x.dtype.name, np.asarray(x).shape))
        out[...] = np.ones(1, np.float32)

    f = eqxc.buffer_callback(callback, jax.ShapeDtypeStruct((1,), jnp.float32))
    for shape, dtype in (((2, 3), jnp.float32), ((6,), jnp.int8), ((), jnp.float32), ((2, 3), jnp.float32)):
        f(jnp.zeros(shape, dtype))
        assert shapes[-1] == (shape, np.dtype(dtype).name, shape)


def test_empty_buffers():
    def callback(ctx, out, x):
        assert x.size == x.nbytes == 0
        assert np.asarray(x).shape == (0, 3)
        assert np.from_dlpack(x).shape == (0, 3)
        out[0].write(np.ones(2, np.float32))
        assert np.asarray(out[1]).shape == (0,)

    outs = (jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((0,), jnp.float32))
    y, empty = eqxc.buffer_callback(callback, outs)(jnp.zeros((0, 3)))
    np.testing.assert_array_equal(y, [1.0, 1.0])
    assert empty.shape == (0,)


def test_made_in_python():
    """A kernel can be called by hand, to test it."""
    from .kernels import add_one

    x, out = np.arange(3, dtype=np.float32), np.empty(3, np.float32)
    add_one(eqxc.ExecutionContext(), eqxc.Buffer(out), eqxc.Buffer(x, writeable=False))
    np.testing.assert_array_equal(out, [1, 2, 3])
    assert not eqxc.Buffer(x, writeable=False).numpy().flags.writeable
    assert eqxc.ExecutionContext().platform == "cpu"


def test_made_in_python_keeps_its_array():
    buffer = eqxc.Buffer(np.arange(1000, dtype=np.int64))
    view = buffer.numpy()
    del buffer
    gc.collect()
    np.testing.assert_array_equal(view, np.arange(1000))


def test_made_in_python_of_sub_byte_elements():
    array = np.array([1, -2, 3], ml_dtypes.int4)
    buffer = eqxc.Buffer(array)
    buffer.write(np.array([4, 5, -6], ml_dtypes.int4))
    np.testing.assert_array_equal(array.astype(np.int8), [4, 5, -6])


def test_made_in_python_refuses():
    with pytest.raises(TypeError, match=r"expected a numpy.ndarray"):
        eqxc.Buffer([1, 2])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="expected a C-contiguous array"):
        eqxc.Buffer(np.zeros((3, 4)).T)
    with pytest.raises(ValueError, match="native byte order"):
        eqxc.Buffer(np.zeros(3, ">f4"))
    with pytest.raises(TypeError, match="expected an array of a dtype that JAX has; got object"):
        eqxc.Buffer(np.array([None]))
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="writeable=True, but the array is read-only"):
        eqxc.Buffer(read_only, writeable=True)


def test_a_subclass_that_forgets_our_init():
    class Careless(eqxc.Buffer):
        def __init__(self):
            pass

    for buffer in (Careless(), eqxc.Buffer.__new__(eqxc.Buffer)):
        for use in (
            lambda b: b.numpy(),
            np.asarray,
            lambda b: b.write(1),
            lambda b: b.torch(),
            lambda b: b.__dlpack__(),
        ):
            with pytest.raises(TypeError, match="__init__ was not called"):
                use(buffer)


def test_truth_values():
    buffer = eqxc.Buffer(np.zeros(2), writeable=np.True_)  # pyright: ignore[reportArgumentType]
    assert buffer.__array__(copy=1).flags.owndata  # pyright: ignore[reportArgumentType]


def test_buffers_cannot_be_copied():
    def callback(ctx, out):
        with pytest.raises(TypeError):
            copy.copy(out)

    inside(callback)
