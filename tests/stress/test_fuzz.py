"""Fuzzed buffers, aliases, attributes and layouts of all kinds. No crash, and an error that says who it is from."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import eqxcallback as eqxc
from eqxcallback import _ext, xla

from ..callback.fake_gpu import OK, UNIMPLEMENTED, run_on_fake_gpu
from ..callback.kernels import like
from .attempt import attempt


quick = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # a failure is not made smaller: that has no bounds
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
DTYPES = sorted(map(str, xla.KERNEL_DTYPES))
# Of elements that are not whole bytes, those bits that stay the same in NumPy, which extends the sign.
MASKS = {"bool": 1, "int2": 1, "uint2": 3, "int4": 7, "uint4": 15, "float4_e2m1fn": 15}
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
SOME = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**70),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from(["x", "y", "a", "b"]),
    st.lists(st.integers(-3, 5), max_size=4),
    st.tuples(st.integers(-(2**70), 2**70), st.integers()),
    st.sampled_from([np.dtype(d).type(1) for d in DTYPES]),
)
X = jnp.zeros((2, 3))


def bits(array):
    return np.asarray(array).ravel().view(np.uint8)


# -- buffers


@quick
@given(st.sampled_from(DTYPES), SHAPES, st.booleans(), st.integers(0, 255))
def test_bytes_of_every_dtype_and_shape_arrive(dtype, shape, checked, byte):
    """Read and written by the kernel as NumPy has them, whatever the bits mean."""
    seen = []

    def kernel(ctx, out, x):
        assert (x.shape, str(x.dtype), out.shape, str(out.dtype)) == (shape, dtype, shape, dtype)
        assert x.size == np.prod(shape, dtype=int)
        seen.append(np.array(x))
        out.numpy()[...] = x.numpy()
        with pytest.raises(ValueError, match="read-only"):
            x.numpy()[...] = 0
        with pytest.raises(ValueError, match=r"Buffer\.write: expected"):
            out.write(np.zeros((*shape, 2), np.float32))

    given_bits = np.full(np.prod(shape, dtype=int) * np.dtype(jnp.dtype(dtype)).itemsize, byte, np.uint8)
    given_bits &= MASKS.get(dtype, 255)
    with jax.enable_x64(True):
        x = jnp.asarray(given_bits.view(jnp.dtype(dtype)).reshape(shape))
        f = eqxc.buffer_callback(kernel, like(x))
        if checked:
            with eqxc.debug.checked(), eqxc.debug.inline():
                got = f(x)
        else:
            got = f(x)
    np.testing.assert_array_equal(bits(got), bits(x))
    assert len(seen) == 1 or not x.size  # where nothing is to be written, XLA calls nothing
    np.testing.assert_array_equal(bits(seen[0] if seen else x), bits(x))


@quick
@given(st.integers(-2, 40), SHAPES, st.sampled_from(["eqxcallback_python", "eqxcallback_python_captured"]))
def test_any_type_number_and_shape_on_a_gpu(fake_xla, dtype, shape, target):
    """XLA's numbers for types, those it has not given yet too. The kernel looks at its buffers and does nothing."""
    seen = []

    def kernel(ctx, out, x):
        seen.append((out.shape, out.dtype, out.nbytes, x.strides, repr(out), out.__cuda_array_interface__["shape"]))

    code, message, _ = run_on_fake_gpu(fake_xla, kernel, np.zeros(256), dtype, shape=shape, target=target)
    if code == OK:
        assert seen[0][0] == seen[0][5] == shape
        return
    assert seen == []
    assert code in (UNIMPLEMENTED, 13)
    assert message


@quick
@given(
    st.one_of(
        SOME,
        SHAPES.map(np.zeros),
        st.sampled_from(["S3", "O", "M8[s]", ">f4"]).map(lambda d: np.zeros(2, d)),
    ),
    st.one_of(st.none(), st.booleans()),
    st.one_of(st.none(), st.lists(st.integers(-2, 5), max_size=4)),
)
def test_buffers_made_by_hand(array, writeable, order):
    buffer, error = attempt(lambda: eqxc.Buffer(array, writeable=writeable, order=order), TypeError, ValueError)
    if buffer is None:
        assert "Buffer" in str(error)
        return
    view = buffer.numpy()
    assert view.shape == buffer.shape
    assert view.size == array.size
    assert np.shares_memory(view, array) or not array.size


# -- aliases


@quick
@given(
    st.dictionaries(
        st.one_of(SOME.filter(lambda x: not isinstance(x, list)), st.integers(0, 3)),
        st.one_of(SOME, st.integers(0, 3)),
        max_size=3,
    )
)
def test_aliases_of_all_kinds(aliases):
    """Over the leaves x, y["a"], y["b"] and results "a", "b", "c". What is accepted is what runs."""
    like_x = like(X)
    results = {"a": like_x, "b": like_x, "c": jax.ShapeDtypeStruct((2,), jnp.float32)}
    seen = []

    def kernel(ctx, out, x, y):
        places = {name: buffer._address for name, buffer in out.items()}
        seen.append([places, [x._address, y["a"]._address, y["b"]._address]])
        for buffer in out.values():
            buffer.write(np.zeros(buffer.shape, np.float32))

    def run():
        return eqxc.buffer_callback(kernel, results, input_output_aliases=aliases)(X, {"a": X + 1, "b": X + 2})

    result, error = attempt(run, TypeError, ValueError)
    if result is None:
        assert str(error).startswith("eqxcallback.buffer_callback(")
        assert "input_output_aliases" in str(error)
        assert seen == []
        return
    ((outputs, inputs),) = seen
    assert sum(place in outputs.values() for place in inputs) >= len(aliases) > 0 or not aliases


@quick
@given(SOME.filter(lambda x: not isinstance(x, list)))
def test_what_is_no_mapping_of_aliases(value):
    if value is None or value == {}:
        return
    with pytest.raises(TypeError, match="expected input_output_aliases to be a mapping; got"):
        eqxc.buffer_callback(lambda ctx, out, x: None, like(X), input_output_aliases=value)


# -- attributes


@quick
@given(SOME)
def test_options_of_native_kernels(value):
    attributes, error = attempt(lambda: xla.attributes({"o": value}, "op"), TypeError, OverflowError)
    if attributes is None:
        assert str(error).startswith("op: the option o is ")
        return
    attribute = attributes["o"]
    assert isinstance(attribute, str | np.generic | np.ndarray)
    if isinstance(attribute, np.generic):
        assert type(value) is type(attribute) or type(attribute) in (np.bool_, np.int64, np.float64)
        assert attribute == value or value != value


KEYS = itertools.count(2**61)  # a failed call leaves its handle in a traceback
ATTRIBUTES = st.one_of(
    st.sampled_from([np.uint64(3), np.int64(3), np.uint32(3), np.float64(3), np.bool_(True), "text"]),
    st.lists(st.integers(-3, 4), min_size=1, max_size=5).map(lambda v: np.array(v, np.int64)),
    st.lists(st.integers(0, 4), min_size=1, max_size=5).map(lambda v: np.array(v, np.int32)),
)


@settings(quick, max_examples=25)
@given(
    st.dictionaries(
        st.sampled_from(["layouts", "name_stack", "portable", "host_callback", "other"]), ATTRIBUTES, max_size=4
    )
)
def test_attributes_of_python_calls(attributes):
    """A program that nobody of ours has made: its kernel runs with a layout that makes sense, or it gets an error."""
    seen = []

    def kernel(ctx, out, x):
        seen.append((out.strides, x.strides))
        out.write(np.asarray(x))

    handle = _ext.Handle(next(KEYS), kernel, direct=True)
    call = jax.ffi.ffi_call("eqxcallback_python", like(X))
    run = jax.jit(lambda x: call(x, key=np.uint64(handle.key), **attributes))
    result, error = attempt(lambda: jax.block_until_ready(run(X)), jax.errors.JaxRuntimeError, ValueError)
    if result is None:
        assert "eqxcallback: expected `layouts`" in str(error)
        assert seen == []
        return
    ((out, x),) = seen
    assert {out, x} <= {(12, 4), (4, 8)}
