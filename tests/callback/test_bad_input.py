"""Calls that are refused before any kernel runs, and the words they are refused with."""

import functools
import types
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .kernels import add_one, callback_like


F32 = jax.ShapeDtypeStruct((2,), jnp.float32)


@pytest.mark.parametrize("not_callable", [3, None, "name", np.zeros(3)])
def test_a_callback_must_be_callable(not_callable):
    with pytest.raises(TypeError, match=r"expected a function callback\(ctx, out, \*args\) -> None; got"):
        eqxc.buffer_callback(not_callable, F32)


def test_a_callback_must_do_its_work_in_the_call():
    async def later(ctx, out, x):
        pass

    def lazy(ctx, out, x):
        yield

    wrong: dict[str, Any] = {"coroutine": later, "generator": lazy}
    for kind, callback in wrong.items():
        with pytest.raises(
            TypeError, match=rf"expected a function callback\(ctx, .*; got a {kind} function, of which a call"
        ):
            eqxc.buffer_callback(callback, F32)


def test_the_parameter_count_is_checked():
    with pytest.raises(
        TypeError, match=r"expected a function that takes \(ctx, out, \*args\); got the signature \(x\)"
    ):
        eqxc.buffer_callback(lambda x: None, F32)
    f = callback_like(add_one, F32)
    with pytest.raises(TypeError, match=r"the call gave 2 positional arguments and the keywords \['k'\]"):
        f(jnp.zeros(2), jnp.zeros(2), k=jnp.zeros(2))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        jax.jit(f)()
    with pytest.raises(TypeError, match="multiple values for argument 'out'"):
        eqxc.buffer_callback(lambda ctx, out, **kwargs: None, F32)(out=jnp.zeros(2))


@pytest.mark.parametrize(
    ("result", "where"),
    [
        (1.0, r"result_shape_dtypes to have `shape` and `dtype`; got 1.0"),
        ({"a": [F32, "x"]}, r"result_shape_dtypes\['a'\]\[1\] to have `shape` and `dtype`; got 'x'"),
        (
            [np.zeros(2), jax.ShapeDtypeStruct((-1,), np.float32)],
            r"result_shape_dtypes\[1\] to have a shape .* got shape=\(-1,\)",
        ),
        (types.SimpleNamespace(shape=(2,), dtype=None), r"the dtype of an array; got shape=\(2,\) and dtype=None"),
        (
            jax.ShapeDtypeStruct((2,), jax.dtypes.float0),
            r"the dtype of an array; got shape=\(2,\) and dtype=dtype\(\[\('float0', 'V'\)\]\) \(No array has this type",
        ),
    ],
)
def test_result_types_are_checked(result, where):
    with pytest.raises(TypeError, match=where):
        eqxc.buffer_callback(add_one, result)


def message_of(call, *args, **kwargs):
    with pytest.raises(TypeError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def kernel(ctx, out, x, *rest, mode=None):
    raise AssertionError("never called")


REMEDY = "Pass arrays only, and give the callback anything else with functools.partial."
X = jnp.zeros(2)


@pytest.mark.parametrize(
    ("args", "kwargs", "where", "got"),
    [
        (("text",), {}, "x", "'text' of type str"),
        ((X, {"a": [X, b"bytes"]}), {}, "args[1]['a'][1]", "b'bytes' of type bytes"),
        ((X,), {"mode": "fast"}, "mode", "'fast' of type str"),
        ((X, "x" * 1000), {}, "args[1]", "'xxxxxxxxxxxx...xxxxxxxxxxxxx' of type str"),
        ((types.SimpleNamespace(shape=(2,), dtype=np.dtype(np.float32)),), {}, "x", None),
    ],
)
@pytest.mark.parametrize("aliases", [None, {0: 0}])
def test_arguments_must_be_arrays(args, kwargs, where, got, aliases):
    f = callback_like(kernel, F32, input_output_aliases=aliases)
    message = message_of(f, *args, **kwargs)
    got = message.split("got ")[1].split(". Pass")[0] if got is None else got
    assert message == (
        f"eqxcallback.buffer_callback(kernel): expected {where} to be an array or a number; got {got}. {REMEDY}"
    )


def test_an_argument_that_is_none_under_jit():
    """A function closes over the argument: JAX itself refuses what is given to `jit`."""
    f = callback_like(kernel, F32)
    message = message_of(jax.jit(lambda x: f(x, "text")), X)
    assert message == (
        "eqxcallback.buffer_callback(kernel): expected args[1] to be an array or a number; got 'text' of type str. "
        + REMEDY
    )


@pytest.mark.parametrize("dtype", ["object", "<U1", ">f4", "datetime64[D]", "complex256"])
def test_arrays_of_dtypes_that_jax_does_not_have(dtype):
    assert message_of(callback_like(kernel, F32), np.zeros(2, dtype)) == (
        f"eqxcallback.buffer_callback(kernel): expected x to be an array or a number; got ndarray of dtype {dtype}. No kernel "
        f"is given arrays of {dtype}. Use a dtype such as float32 or int32 instead."
    )


def test_numbers_keys_and_scalars_are_arrays():
    seen = []
    f = eqxc.buffer_callback(lambda ctx, out, *args: seen.extend(arg.dtype.name for arg in args), ())
    tap = eqxc.buffer_callback(
        lambda ctx, out, *args: seen.extend(arg.dtype.name for arg in args), (), has_side_effect=True
    )
    for call in (f, tap):
        call(1, 1.0, True, 1j, np.float32(1), np.bool_(True), jax.random.key(0))
    jax.effects_barrier()
    assert seen == ["int32", "float32", "bool", "complex64", "float32", "bool", "uint32"]


@pytest.mark.parametrize("option", ["has_side_effect", "command_buffer_compatible"])
def test_flags_are_bools(option):
    def make(value: Any):
        options: Any = {option: value}
        return eqxc.buffer_callback(add_one, F32, **options)

    with pytest.raises(TypeError, match=f"expected {option} to be True or False; got None"):
        make(None)
    np.testing.assert_array_equal(make(np.True_)(jnp.zeros(2)), [1, 1])


def test_decorated_kernels_have_their_own_signature():
    def kernelize(function):
        @functools.wraps(function)
        def kernel(ctx, out, *args):
            out.write(function(*map(np.asarray, args)))

        return kernel

    f = callback_like(kernelize(lambda x: x + np.float32(1)), F32)
    np.testing.assert_array_equal(f(jnp.zeros(2)), [1, 1])


def test_mocks_are_callables():
    kernel = mock.Mock(return_value=None)
    callback_like(kernel, F32, input_output_aliases={0: 0})(jnp.zeros(2))
    assert kernel.call_count == 1


def test_lowering_for_another_platform():
    f = callback_like(add_one, F32)
    with pytest.raises(
        ValueError, match="add_one cannot be lowered for tpu: the python lane has handlers for cpu, cuda"
    ):
        jax.jit(f).trace(jnp.zeros(2)).lower(lowering_platforms=("tpu",))


def test_refs_are_refused():
    """Also after arrays of the same kind were taken, of whose types a callback keeps a list."""
    f = eqxc.buffer_callback(add_one, F32)
    text = r"add_one\): expected x to be an array or a number; got a jax\.Ref\. Pass the values there, ref\[\.\.\.\]: a Layer"
    ref = jax.new_ref(jnp.zeros(2))
    for of in (lambda f: f, jax.jit):
        of(f)(jnp.zeros(2))
        with pytest.raises(TypeError, match=text):
            of(f)(ref)
    with pytest.raises(TypeError, match=r"expected x to be an array or a number; got a view of a jax\.Ref"):
        jax.jit(lambda ref: f(ref.at[:]))(ref)
    np.testing.assert_array_equal(f(ref[...]), [1, 1])


def test_arrays_on_two_devices():
    x, y = (jax.device_put(jnp.zeros(2), device) for device in jax.devices()[:2])
    f = eqxc.buffer_callback(lambda ctx, out, x, y: out.write(x), F32)
    with pytest.raises(
        ValueError, match=r"expected arrays on the same devices; got x on \S*cpu:0 and y on \S*cpu:1\. jax"
    ):
        f(x, y)
