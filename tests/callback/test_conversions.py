"""Numbers of Python that Buffers without axes become, `len`, and attributes that only arrays have."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eqxcallback import Buffer, buffer_callback


def one(value, dtype):
    return Buffer(np.array(value, dtype))


def test_an_operand_that_says_where():
    def kernel(ctx, out, values, i):
        out[...] = values[...]
        out[int(i)] = values[i] * np.float32(10)

    f = jax.jit(lambda values, i: buffer_callback(kernel, jax.ShapeDtypeStruct((4,), jnp.float32))(values, i))
    np.testing.assert_array_equal(f(jnp.arange(4.0), jnp.int32(2)), [0, 1, 20, 3])


def test_numbers():
    assert (int(one(3, np.int32)), float(one(3, np.int32)), list(range(one(2, np.uint8)))) == (3, 3.0, [0, 1])
    assert (int(one(2.5, np.float32)), float(one(2.5, ml_dtypes.bfloat16)), complex(one(1j, np.complex64))) == (
        2,
        2.5,
        1j,
    )
    assert int(one(-3, ml_dtypes.int4)) == -3
    assert (len(Buffer(np.zeros((2, 3)))), len(Buffer(np.zeros((0, 3))))) == (2, 0)


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda: int(Buffer(np.zeros(1))), "int: expected a Buffer without axes; got float64[1]. Take the array over"),
        (lambda: float(Buffer(np.zeros((1, 2)))), "float: expected a Buffer without axes; got float64[1,2]."),
        (
            lambda: range(one(1.0, np.float32)),
            "an index: expected a Buffer of integers; got float32[]. Convert it: int(x).",
        ),
        (lambda: len(one(1, np.int32)), "len: a Buffer without axes has no length."),
        (lambda: float(one(1j, np.complex64)), "must be a string or a real number, not 'complex'"),
    ],
)
def test_what_is_no_number(use, error):
    with pytest.raises(TypeError, match=re.escape(error)):
        use()


def test_attributes_of_arrays():
    x = Buffer(np.zeros(3))
    for name in ("reshape", "T", "sum", "astype"):
        assert not hasattr(x, name)
        with pytest.raises(AttributeError, match=rf"'Buffer' object has no attribute '{name}'\. Take the array over"):
            getattr(x, name)
    with pytest.raises(AttributeError, match=r"'Buffer' object has no attribute 'other'$"):
        getattr(x, "other")  # noqa: B009


def test_one_number_for_all_elements():
    x = Buffer(np.zeros(3, np.float32))
    with pytest.raises(
        ValueError, match=r"without broadcasts and casts\. The array over its memory broadcasts: numpy\."
    ):
        x[...] = 0
