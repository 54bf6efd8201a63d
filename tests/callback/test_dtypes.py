"""Every dtype that JAX has, through a callback and back, byte by byte."""

import contextlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqxcallback as eqxc

from .kernels import callback_like


WHOLE = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
SUB_BYTE = ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"]


# What JAX knows and no kernel is given, and what is said in its place.
REFUSED = {"int1": "int8", "uint1": "uint8", "float6_e2m3fn": "float8_e4m3fn", "float6_e3m2fn": "float8_e4m3fn"}


def known_to_jax():
    """Names of dtypes: those of NumPy and ml_dtypes that JAX has an abstract value for."""
    types = {t for t in np.sctypeDict.values() if np.dtype(t).itemsize}
    types |= {t for t in vars(ml_dtypes).values() if isinstance(t, type) and issubclass(t, np.generic)}
    for t in types:
        with contextlib.suppress(TypeError):
            jnp.issubdtype(t, np.generic)
            jax.typeof(np.zeros(2, t))
            yield np.dtype(t).name


def test_every_dtype_that_jax_knows_is_here(x64):
    """A new one has to be put somewhere."""
    temporal = {"datetime64", "timedelta64"}
    assert {*known_to_jax()} - temporal == {*WHOLE, *SUB_BYTE, *REFUSED}


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def random_array(name, shape, seed=0):
    """Any bit pattern, but for bool and the packed types, whose bytes hold less."""
    dtype, rng = dtype_of(name), np.random.default_rng(seed)
    size = int(np.prod(shape))
    if name in SUB_BYTE:
        bits = 2 if "2" in name[:5] else 4
        return rng.integers(0, 2**bits, size, np.uint8).view(dtype).reshape(shape)
    if name == "bool":
        return rng.integers(0, 2, size, np.uint8).view(dtype).reshape(shape)
    return rng.integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype).reshape(shape)


def same_bits(a, b):
    return np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def copy(ctx, out, x):
    assert x.dtype == out.dtype == np.asarray(x).dtype == np.asarray(out).dtype
    out.write(x)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("jit", [False, True])
def test_round_trip(name, jit, x64):
    x = random_array(name, (3, 5))
    f = callback_like(copy, x)
    y = (jax.jit(f) if jit else f)(jnp.asarray(x))
    assert y.dtype == x.dtype
    assert same_bits(y, x)


@pytest.mark.parametrize("name", SUB_BYTE)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 1023])
@pytest.mark.parametrize("jit", [False, True])
def test_sub_byte_round_trip(name, size, jit):
    """XLA packs these. JAX's own callback writes one byte for each element, past the end of the memory."""
    x = random_array(name, (size,))
    f = callback_like(copy, x)
    y = (jax.jit(f) if jit else f)(jnp.asarray(x))
    assert y.dtype == x.dtype
    assert same_bits(y, x)


@pytest.mark.parametrize("name", SUB_BYTE)
@pytest.mark.parametrize("method", ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all"])
def test_sub_byte_under_vmap(name, method):
    """An odd number of elements, so that examples do not end where bytes do, and axes that are moved."""
    x = random_array(name, (3, 5, 7))

    def swap(ctx, out, x, y):
        assert out[0].shape[-1] == 5
        np.asarray(out[0])[...] = np.broadcast_to(np.asarray(y), out[0].shape)
        out[1].write(x)

    like = jax.ShapeDtypeStruct((5,), x.dtype)
    f = eqxc.buffer_callback(swap, (like, like), vmap_method=method)
    mapped = jax.vmap(jax.vmap(f, (0, None)), (2, None), out_axes=2)
    y = random_array(name, (5,), seed=1)
    mapped = jax.jit(mapped, compiler_options={"xla_backend_optimization_level": 0})
    first, second = mapped(jnp.asarray(x), jnp.asarray(y))
    assert first.shape == second.shape == (3, 5, 7)
    assert same_bits(second, x)
    assert same_bits(first, np.broadcast_to(y[None, :, None], x.shape).copy())


@pytest.mark.parametrize("name", SUB_BYTE)
@pytest.mark.parametrize("shape", [(), (1, 1, 3), (3, 5), (2, 3, 5, 7)])
def test_sub_byte_of_any_rank(name, shape):
    x = random_array(name, shape)
    y = callback_like(copy, x)(jnp.asarray(x))
    assert y.shape == shape
    assert same_bits(np.asarray(y).reshape(-1), x.reshape(-1))


@pytest.mark.parametrize("name", REFUSED)
def test_what_xla_gives_no_kernel_is_refused_by_name(name):
    dtype = dtype_of(name)
    problem = f"XLA gives no kernel arrays of {name}. Use {REFUSED[name]} instead"
    with pytest.raises(TypeError) as caught:
        eqxc.buffer_callback(copy, jax.ShapeDtypeStruct((3,), dtype))
    assert str(caught.value) == (
        "eqxcallback.buffer_callback(copy): expected result_shape_dtypes to have a shape of non-negative integers and the "
        f"dtype of an array; got shape=(3,) and dtype={dtype!r} ({problem})."
    )
    f = eqxc.buffer_callback(copy, jax.ShapeDtypeStruct((3,), np.float32))
    for call in (f, jax.vmap(f), lambda x: jax.eval_shape(f, x)):
        with pytest.raises(TypeError) as caught:
            call(np.zeros((3,), dtype))
        assert str(caught.value).startswith(
            "eqxcallback.buffer_callback(copy): expected x to be an array or a number; got "
        )
        assert str(caught.value).endswith(f" of dtype {name}. {problem}.")


def test_sub_byte_sizes():
    def callback(ctx, out, x):
        assert (x.size, x.nbytes, x.strides, x.shape) == (15, 8, (5, 1), (3, 5))
        array = np.asarray(x)
        assert array.nbytes == 15
        assert not array.flags.writeable
        assert np.shares_memory(np.asarray(x), array)
        with pytest.raises(BufferError, match="packed int4 has no DLPack form"):
            np.from_dlpack(x)
        out[...] = np.zeros(1, np.float32)

    x = jnp.zeros((3, 5), jnp.int4)
    callback_like(callback, jnp.zeros(1))(x)


def test_sub_byte_aliased_output_starts_with_the_input():
    def increment_second(ctx, out, x):
        np.asarray(out)[1] = 5

    x = np.array([1, 2, 3], ml_dtypes.int4)
    f = callback_like(increment_second, x, input_output_aliases={0: 0})
    np.testing.assert_array_equal(np.asarray(f(jnp.asarray(x))).astype(np.int8), [1, 5, 3])


def test_sub_byte_output_is_left_alone_if_the_callback_fails():
    def fail(ctx, out, x):
        np.asarray(out)[...] = 7
        raise ValueError("no")

    x = jnp.array([1, 2, 3], jnp.int4)
    with pytest.raises(eqxc.KernelError, match="no"):
        callback_like(fail, x, input_output_aliases={0: 0})(x)
    np.testing.assert_array_equal(x.astype(jnp.int8), [1, 2, 3])


def test_explicit_64_bit_results_are_kept_without_x64():
    """As `jax.ffi.ffi_call` does: who writes float64 in a result's type means it."""
    f = eqxc.buffer_callback(lambda ctx, out: out.write(np.array([0.1])), jax.ShapeDtypeStruct((1,), np.float64))
    y = f()
    assert y.dtype == np.float64
    assert np.asarray(y)[0] == 0.1


def test_typed_keys_as_results():
    key = jax.random.key(7)
    f = callback_like(lambda ctx, out, x: out.write(x), key)
    for g in (f, jax.jit(f)):
        assert jnp.issubdtype(g(key).dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(jax.random.key_data(g(key)), jax.random.key_data(key))


def test_typed_keys_arrive_as_their_words():
    def callback(ctx, out, key):
        out.write(key)

    key = jax.random.key(7)
    words = eqxc.buffer_callback(callback, jax.ShapeDtypeStruct((2,), jnp.uint32))(key)
    np.testing.assert_array_equal(words, jax.random.key_data(key))
