"""What is refused before any kernel runs, and the words it is refused with."""

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
        (jax.ShapeDtypeStruct((2,), jax.dtypes.float0), r"the dtype of an array; .* float0|dtype="),
    ],
)
def test_result_types_are_checked(result, where):
    with pytest.raises(TypeError, match=where):
        eqxc.buffer_callback(add_one, result)


def test_arguments_must_be_arrays():
    with pytest.raises(TypeError, match=r"str|not a valid JAX type"):
        callback_like(add_one, F32)("text")


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
    callback_like(kernel, F32)(jnp.zeros(2))
    assert kernel.call_count == 1


def test_lowering_for_another_platform():
    f = callback_like(add_one, F32)
    with pytest.raises(
        ValueError, match="add_one cannot be lowered for tpu: the python lane has handlers for cpu, cuda"
    ):
        jax.jit(f).trace(jnp.zeros(2)).lower(lowering_platforms=("tpu",))
