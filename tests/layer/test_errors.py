"""Kernels of layers that raise an exception: what the caller sees of it."""

import re
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

import eqxcallback as eqxc

from ..transform.library import SAXPY
from . import failing
from .failing import Broken, BrokenBackward, BrokenPythonKernel, Oops, helper, loss
from .layers import Identity, X


FAILING = {
    "kernel": (Broken(), "Broken"),
    "python kernel": (BrokenPythonKernel(), "BrokenPythonKernel"),
    "backward": (jax.grad(loss(BrokenBackward())), "BrokenBackward"),
    "vmap": (lambda x: jax.vmap(Broken())(x[None]), "Broken"),
    "scan": (lambda x: jax.lax.scan(lambda c, _: (Broken()(c), None), x, length=2), "Broken"),
}


@pytest.mark.parametrize("name", [name for name in FAILING if name != "scan"])  # which is compiled
def test_eager_calls_raise_from_the_original(name):
    f, layer = FAILING[name]
    x = jnp.asarray(X)
    for _ in range(2):
        with pytest.raises(eqxc.KernelError, match="broken") as caught:
            f(x)
        error = caught.value
        assert isinstance(error.original, Oops)
        assert error.__cause__ is error.original or name == "backward"  # JAX says between them where the call was
        assert error.layer == layer
        assert error.operands.startswith("(float32[")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("name", FAILING)
def test_the_original_is_what_the_kernel_raised(name, wrap):
    """Also where JAX puts an exception of its own between them, which says where the call was: in `grad` and `checkpoint`."""
    f, _ = FAILING[name]
    with pytest.raises(eqxc.KernelError) as caught, eqxc.raising():
        jax.block_until_ready(wrap(f)(jnp.asarray(X)))
    error = caught.value
    assert isinstance(error.original, Oops)
    assert error.original in (error.__cause__, error.__cause__ and error.__cause__.__cause__)


def fails(ctx, out, x):
    helper()


class Sequential(Broken):
    vmap_method = "sequential"


class Unrolled(Broken):
    vmap_method = "sequential_unrolled"


SEQUENTIAL = {
    "layer": (jax.vmap(Sequential()), "Sequential"),
    "unrolled": (jax.vmap(Unrolled()), "Unrolled"),
    "nested": (jax.vmap(jax.vmap(Sequential())), "Sequential"),
    "grad": (jax.value_and_grad(loss(jax.vmap(Sequential()))), "Sequential"),
    "op": (jax.vmap(eqxc.Op("op", {"cpu": eqxc.PythonKernel(fails)}, lambda x: x, "sequential")), "fails"),
    "callback": (
        jax.vmap(eqxc.buffer_callback(fails, jax.ShapeDtypeStruct((3,), np.float32), vmap_method="sequential")),
        "fails",
    ),
}


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_eager_calls_of_sequential_methods_raise_from_the_original(name):
    f, layer = SEQUENTIAL[name]
    x = jnp.stack([X, X])[None] if name == "nested" else jnp.stack([X, X])
    for _ in range(2):
        with pytest.raises(eqxc.KernelError, match="broken") as caught:
            f(x)
        assert isinstance(caught.value.original, Oops)
        assert caught.value.layer == layer
        assert caught.value.operands == "(float32[3]) -> (float32[3])"
    with pytest.raises(JaxRuntimeError, match=layer) as caught:
        jax.block_until_ready(jax.jit(f)(x))
    assert not isinstance(caught.value, eqxc.KernelError)


def test_an_eager_call_of_a_sequential_method_waits():
    """JAX runs a loop later if its operands are still being computed."""

    class Fine(Identity):
        vmap_method = "sequential"

    x = jax.jit(lambda a: jax.lax.fori_loop(0, 20, lambda _, a: a @ a * 1e-3, a)[:2, :3])(jnp.ones((1000, 1000)))
    with pytest.raises(eqxc.KernelError, match="broken"):
        jax.vmap(Sequential())(x)
    jax.block_until_ready(jax.vmap(Fine())(x))  # or JAX raises the failure again when the process ends: docs/errors.md


def test_an_interrupt_of_a_sequential_method():
    class Interrupted(Sequential):
        def kernel(self, ctx, out, x):
            raise KeyboardInterrupt("stop")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        jax.vmap(Interrupted())(jnp.stack([X, X]))


@pytest.mark.parametrize("name", FAILING)
def test_raising_under_jit(name):
    f, layer = FAILING[name]
    with pytest.raises(eqxc.KernelError) as caught, eqxc.raising():
        jax.block_until_ready(jax.jit(f)(X))
    assert isinstance(caught.value.original, Oops)
    assert caught.value.layer == layer
    assert "jit(" in caught.value.name_stack or name == "scan"  # JAX lowers the body of a loop by itself
    with pytest.raises(JaxRuntimeError, match="INTERNAL: .*" + re.escape(layer)) as caught:
        jax.block_until_ready(jax.jit(f)(X))
    assert not isinstance(caught.value, eqxc.KernelError)


@pytest.mark.parametrize("name", ["kernel", "python kernel", "backward"])
def test_the_users_frames_come_first(name):
    f, layer = FAILING[name]
    with pytest.raises(JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(f)(X))
    lines = str(caught.value).splitlines()
    assert re.match(
        rf"INTERNAL: {re.escape(layer)} in jit\(.* failed; python lane, \(float32\[3\].*\[failure \d+\]$", lines[0]
    )
    assert lines[2].startswith(f'  File "{failing.__file__}"')
    assert "eqxcallback/layer" not in str(caught.value)
    assert lines[-1].endswith("Oops: the kernel is broken")


@pytest.mark.parametrize("name", FAILING)
def test_filter_jit_shows_what_jit_does(name):
    f, layer = FAILING[name]
    texts = []
    for jit in (jax.jit, eqx.filter_jit):
        with pytest.raises(JaxRuntimeError) as caught:
            jax.block_until_ready(jit(lambda x: f(x))(X))
        assert type(caught.value) is JaxRuntimeError
        texts.append(re.sub(r"\[failure \d+\]", "", str(caught.value)))
    assert texts[0] == texts[1]
    assert texts[1].startswith(f"INTERNAL: {layer}")
    with pytest.raises(eqxc.KernelError, match=re.escape(layer)) as caught, eqxc.raising():
        jax.block_until_ready(eqx.filter_jit(f)(X))
    assert caught.value.__cause__ is caught.value.original


def test_the_text_of_an_interrupted_scope():
    with pytest.raises(eqxc.KernelError, match=r"Broken in jit\(step\)/layer_3"), eqxc.raising():
        jax.block_until_ready(step(X))


@jax.jit
def step(x):
    with jax.named_scope("layer_3"):
        return Broken()(x)


def test_a_working_call_after_a_failing_one():
    class Sometimes(Identity):
        def kernel(self, ctx, out, x):
            if np.asarray(x)[0] < 0:
                raise Oops
            np.copyto(np.asarray(out), np.asarray(x))

    f = jax.jit(Sometimes().__call__)
    for _ in range(2):
        with pytest.raises(JaxRuntimeError):
            jax.block_until_ready(f(-X))
        np.testing.assert_array_equal(f(X), X)
        np.testing.assert_array_equal(Sometimes()(X), X)


def test_native_kernels():
    class Fails(Identity):
        kernels: ClassVar[Any] = {"cpu": eqxc.NativeKernel("Fail", SAXPY)}

    for f in (Fails(), jax.jit(Fails().__call__)):
        with pytest.raises(JaxRuntimeError, match="this kernel always fails"):
            jax.block_until_ready(f(X))


def test_arrays_on_two_devices():
    class Sum(eqx.Module):
        inner: Any

    class Scaled(eqxc.Layer):
        weight: Any
        vmap_method = "fold"

        def kernel(self, ctx, out, x):
            out.write(np.asarray(x) * np.asarray(self.weight.inner))

        def reference(self, x):
            return x * self.weight.inner

    weight, x = (jax.device_put(X, device) for device in jax.devices()[:2])
    text = r"Scaled: expected arrays on the same devices; got self\.weight\.inner on \S*cpu:0 and x on \S*cpu:1\. jax\.device_put"
    for f in (Scaled(Sum(weight)), jax.grad(lambda x: Scaled(Sum(weight))(x).sum())):
        with pytest.raises(ValueError, match=text):
            f(x)
    np.testing.assert_array_equal(Scaled(Sum(jnp.asarray(X)))(x), X * X)  # not committed to a device
