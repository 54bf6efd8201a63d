"""DLPack, as libraries see it that know more dtypes than NumPy: the exported capsules, read by a consumer of our own."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .dlpack_consumer import DTYPES, take
from .kernels import address, callback_like
from .test_dtypes import WHOLE, random_array, same_bits


def test_the_consumer_knows_every_dtype():
    assert sorted(DTYPES.values()) == sorted(WHOLE)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_a_consumer_reads_and_writes_each_dtype(name, max_version, x64):
    x = random_array(name, (3, 5))

    def callback(ctx, out, x):
        source, release_source = take(x.__dlpack__(max_version=(1, 0)))
        target, release_target = take(out.__dlpack__(max_version=max_version))
        assert (source.read_only, target.read_only) == (True, False)
        assert source.device == target.device == (1, 0)
        assert source.array.dtype == x.dtype == target.array.dtype
        assert (address(source.array), address(target.array)) == (address(np.asarray(x)), address(np.asarray(out)))
        assert source.array.shape == target.array.shape == (3, 5)
        target.array[...] = source.array
        release_source()
        release_target()

    assert same_bits(callback_like(callback, x)(jnp.asarray(x)), x)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_torch_gets_a_capsule_of_the_dtype(name, monkeypatch):
    """Also of an input, which it may not say is read-only: some PyTorches refuse that."""
    releases = []

    def from_dlpack(capsule):
        assert "versioned" not in repr(capsule)
        taken, release = take(capsule)
        releases.append(release)
        return taken.array

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(from_dlpack=from_dlpack))
    x = random_array(name, (7,))

    def callback(ctx, out, x):
        out.torch()[...] = x.torch()
        for release in releases:
            release()

    assert same_bits(callback_like(callback, x)(jnp.asarray(x)), x)
    assert len(releases) == 2


def test_a_capsule_keeps_its_buffer_until_it_is_deleted():
    counts = []

    def callback(ctx, out, x):
        def count():
            counts.append(sys.getrefcount(x))

        count()
        _, release = take(x.__dlpack__(max_version=(1, 0)))
        count()
        release()
        count()
        capsule = x.__dlpack__(max_version=(1, 0))
        count()
        del capsule  # nobody took it
        count()
        out.write(x)

    callback_like(callback, jnp.zeros(3))(jnp.zeros(3))
    before = counts[0]
    assert [count - before for count in counts] == [0, 1, 0, 1, 0]


def test_jnp_asarray_copies():
    """It raises with JAX's own buffers, which claim to be on a GPU."""
    kept = []

    def callback(ctx, out, x):
        for buffer in (x, out):
            array = jax.block_until_ready(jnp.asarray(buffer))
            assert array.dtype == buffer.dtype
            assert address(array) != address(np.asarray(buffer))
        kept.append(jax.block_until_ready(jnp.asarray(x)))
        out.write(np.asarray(kept[0] * 2.0))

    x = jnp.arange(3.0)
    f = callback_like(callback, x)
    for g in (f, jax.jit(f)):
        np.testing.assert_array_equal(g(x), [0.0, 2.0, 4.0])
    np.testing.assert_array_equal(kept[0], x)


def test_jnp_from_dlpack_is_the_same_memory():
    def callback(ctx, out, x):
        out.write(x)
        array = jnp.from_dlpack(out)
        assert address(array) == address(np.asarray(out))
        np.testing.assert_array_equal(array, [0.0, 1.0, 2.0])
        del array
        if jax.__version_info__ >= (0, 12):
            assert address(jnp.from_dlpack(x)) == address(np.asarray(x))
        else:  # it does not ask for the version of DLPack that can say read-only
            with pytest.raises(BufferError, match=r"read-only, which DLPack can say from version 1\.0 on"):
                jnp.from_dlpack(x)

    x = jnp.arange(3.0)
    np.testing.assert_array_equal(callback_like(callback, x)(x), x)


@pytest.mark.parametrize("max_version", [(), ("a",), 1, [1, 0]])
def test_a_version_that_is_none(max_version):
    with pytest.raises(TypeError, match=r"expected `max_version` to be \(major, minor\)"):
        eqxc.Buffer(np.zeros(3)).__dlpack__(max_version=max_version)
