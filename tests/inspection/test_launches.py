"""The report of an inspection on each launch on a GPU."""

import jax.numpy as jnp
import pytest

import eqxcallback as eqxc
from eqxcallback import ops

from ..kernels.compiling import unavailable


pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

X = jnp.ones((300, 1000), jnp.bfloat16)


def launches(fn, *args):
    (call,) = eqxc.inspect(fn, *args, platform="cuda").calls
    return call.launches


def test_a_compiled_kernel_says_what_it_takes(monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "sm_90")
    (launch,) = launches(ops.softmax, X)
    # A warp for each of 300 rows.
    assert (launch.grid, launch.block) == ((75, 1, 1), (32, 4, 1))
    assert 8 <= (launch.registers or 0) <= 255
    assert launch.stack_bytes == 0
    assert launch.entry.encode() in launch.image
    assert str(launch) == (
        f"softmax: 75 blocks of 32 x 4 threads, {launch.shared_bytes:,} bytes of shared memory, {launch.registers} registers"
    )


def test_the_driver_knows_what_ptx_takes(monkeypatch):
    monkeypatch.delenv("EQXCALLBACK_CUDA_ARCH", raising=False)
    (launch,) = launches(ops.softmax, X)
    assert (launch.registers, launch.stack_bytes) == (None, None)
    assert launch.image.lstrip().startswith(b"//")
    assert "registers" not in str(launch)


def test_every_launch_is_there(monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "sm_90")
    q, cache = jnp.ones((4, 64), jnp.bfloat16), jnp.ones((4096, 2, 64), jnp.bfloat16)
    texts = [str(launch) for launch in launches(ops.decode_attention, q, cache, cache, 9)]
    assert [text.split(":")[0] for text in texts] == ["decode_attention", "decode_attention_join"]


def test_a_triton_kernel_has_the_shared_memory_that_it_asks_for_at_run_time(monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "sm_90")
    q = jnp.ones((256, 2, 64), jnp.bfloat16)
    (launch,) = launches(lambda q: ops.attention(q, q, q, causal=True), q)
    assert (launch.registers or 0) > 32
    assert launch.shared_bytes > 16 * 1024


def test_other_kernels_launch_nothing():
    (call,) = eqxc.inspect(ops.softmax, X, platform="cpu").calls
    assert call.launches == ()
