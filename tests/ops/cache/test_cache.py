"""Caches of any dtype, and positions that are out of range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from . import cases


pytestmark = pytest.mark.any_jax_version


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.float64, np.complex64, np.uint16])
def test_a_cache_of_any_dtype(dtype, x64):
    case = cases.cache_append(np.float32, (2,), 7, 3, (5,))
    cache, rows = (np.asarray(10 * x).astype(dtype) for x in case.args[:2])
    got = case.op(cache, rows, case.args[2])
    np.testing.assert_array_equal(got, case.reference(*map(jnp.asarray, (cache, rows, case.args[2]))))


by_isa = pytest.mark.usefixtures("isa")


@by_isa
@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.int8, jnp.bool_, jnp.float16, jnp.complex64, jnp.uint32])
def test_cache_append_of_any_dtype(dtype):
    cache, rows = jnp.zeros((6, 3), dtype), jnp.ones((2, 3), dtype)
    out = ops.cache_append(cache, rows, 3)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out.astype(jnp.complex64)[:, 0], [0, 0, 0, 1, 1, 0])


@by_isa
def test_cache_append_of_keys():
    keys = jax.random.split(jax.random.key(0), 6)
    out = ops.cache_append(keys, keys[:2], 4)
    assert (jax.random.key_data(out)[4:] == jax.random.key_data(keys)[:2]).all()


@by_isa
@pytest.mark.parametrize(
    ("position", "first"), [(np.uint32(2**31 + 5), 4), (np.int32(-3), 0), (np.int32(2**31 - 1), 4), (np.uint8(255), 4)]
)
def test_positions_out_of_range_are_clamped(position, first):
    out = ops.cache_append(jnp.zeros((6, 1)), jnp.ones((2, 1)), position)
    assert np.flatnonzero(out).tolist() == [first, first + 1]


@by_isa
def test_positions_of_64_bits(x64):
    for position, first in ((np.int64(2**32), 4), (np.int64(-(2**40)), 0), (np.uint64(2**63), 4)):
        out = ops.cache_append(jnp.zeros((6, 1)), jnp.ones((2, 1)), position)
        assert np.flatnonzero(out).tolist() == [first, first + 1]


def test_the_handler_refuses_elements_of_less_than_a_byte():
    cache, rows = jnp.zeros((4, 6), jnp.int4), jnp.ones((1, 6), jnp.int4)
    call = jax.ffi.ffi_call(
        "eqxcallback_cache_append", jax.ShapeDtypeStruct(cache.shape, cache.dtype), input_output_aliases={0: 0}
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"cache_append.*: expected elements of whole bytes"):
        jax.block_until_ready(jax.jit(lambda *args: call(*args, row_rank=np.int64(1)))(cache, rows, jnp.int32(1)))
