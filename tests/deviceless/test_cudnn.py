"""XLA's plans for attention by cuDNN: one call, recorded into a command buffer, and no array in another order."""

import jax
import pytest

import eqxcallback as eqxc
from benchmarks.programs import struct
from eqxcallback import ops, xla

from ..ops.attention import by_cudnn
from .programs import thunks


# A kernel that XLA has made, in older versions and in newer ones.
OF_XLA = ("kCustomKernel", "kKernel")
Q, KV = struct(2, 256, 8, 128), struct(2, 256, 2, 128)


def gradients(deterministic):
    def f(q, k, v, cotangent):
        def attend(*args):
            return ops.attention(*args, causal=True, window=100, deterministic=deterministic)

        return jax.vjp(attend, q, k, v)[1](cotangent)

    return f


def kinds(function, *args):
    """The kinds of the recorded thunks. All are recorded."""
    options = dict(eqxc.jit_captured(function).compiler_options)
    with by_cudnn.usable():
        every = thunks(xla.compile_deviceless(function, *args, compiler_options=options))
    assert all(thunk.buffer is not None for thunk in every if thunk.kind != "kCommandBuffer")
    return [thunk.kind for thunk in every if thunk.kind != "kCommandBuffer"]


def test_value():
    assert kinds(lambda q, k, v: ops.attention(q, k, v, causal=True), Q, KV, KV) == ["kCuDnn"]


def test_gradients_in_any_order():
    assert kinds(gradients(False), Q, KV, KV, Q) == ["kCuDnn", "kCuDnn"]


def test_gradients_in_one_order():
    """Beside the two calls, the log-sum-exp is brought into our order, and its cotangent is an array of zeros."""
    pytest.importorskip("triton", reason="Triton is not installed")
    made = kinds(gradients(True), Q, KV, KV, Q)
    assert sorted(made) == ["kCuDnn", "kCustomCall", *2 * [name for name in OF_XLA if name in made]]
