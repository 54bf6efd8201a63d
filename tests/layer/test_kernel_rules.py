"""The rights of a layer's kernels, and their limits: interrupts, results, and buffers that are kept or written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .failing import loss
from .layers import Identity, X


@pytest.mark.parametrize("on_error", ["raise", "poison"])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupts_propagate(interrupt, on_error):
    class Interrupted(Identity):
        def kernel(self, ctx, out, x):
            raise interrupt("stop")

    make = type("Interrupted", (Interrupted,), {"on_error": on_error})
    with pytest.raises(interrupt, match="stop"):
        make()(X)
    with pytest.raises(interrupt, match="stop"), eqxc.raising():
        jax.block_until_ready(jax.jit(lambda x: make()(x))(X))


@pytest.mark.parametrize("wrong", ["kernel", "backward"])
def test_kernels_return_none(wrong):
    class Returns(Identity):
        def kernel(self, ctx, out, x):
            np.copyto(np.asarray(out), np.asarray(x))
            return out if wrong == "kernel" else None

        def backward(self, ctx, grads, args, out, cotangents):
            return np.asarray(cotangents)

    with pytest.raises(eqxc.KernelError, match="must return None"):
        jax.grad(loss(Returns()))(X)


def test_buffers_die_with_the_call():
    kept = []

    class Keeps(Identity):
        def kernel(self, ctx, out, x):
            kept.extend([out, x])
            np.copyto(np.asarray(out), np.asarray(x))

    class KeepsOwn(Keeps):
        weight: jax.Array

        def kernel(self, ctx, out, x):
            kept.append(self.weight)
            np.copyto(np.asarray(out), np.asarray(x))

    Keeps()(X)
    jax.block_until_ready(jax.jit(KeepsOwn(jnp.asarray(X)).__call__)(X))
    assert len(kept) == 3
    for buffer in kept:
        with pytest.raises(RuntimeError, match="Buffer used after its kernel returned"):
            np.asarray(buffer)
        with pytest.raises(RuntimeError, match="Buffer used after its kernel returned"):
            _ = buffer.shape


@pytest.mark.parametrize("what", ["x", "weight", "out of backward", "cotangents"])
def test_inputs_are_read_only(what):
    class Writes(Identity):
        weight: jax.Array

        def kernel(self, ctx, out, x):
            if what in ("x", "weight"):
                np.asarray({"x": x, "weight": self.weight}[what])[...] = 0
            np.copyto(np.asarray(out), np.asarray(x))

        def backward(self, ctx, grads, args, out, cotangents):
            np.asarray(out if what == "out of backward" else cotangents)[...] = 0

    weight = jnp.asarray(X)
    with pytest.raises(eqxc.KernelError, match="read-only"):
        jax.grad(loss(Writes(weight)))(X)
    np.testing.assert_array_equal(weight, X)


def test_a_kernel_may_run_layers_and_jax():
    class Outer(Identity):
        def kernel(self, ctx, out, x):
            inner = Identity()(np.array(x))
            np.asarray(out)[...] = jax.jit(jnp.add)(inner, inner)

    np.testing.assert_array_equal(Outer()(X), 2 * X)
    np.testing.assert_array_equal(jax.jit(Outer().__call__)(X), 2 * X)
