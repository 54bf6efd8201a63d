"""Kernels of layers that fail, and what is left in their results."""

import re
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

import eqxcallback as eqxc

from ..transform.library import SAXPY
from .layers import Identity, X


class Oops(Exception):
    """Not an exception that anybody else raises."""


def helper():
    raise Oops("the kernel is broken")


class Broken(Identity):
    def kernel(self, ctx, out, x):
        helper()


def broken_body(ctx, out, layer, x):
    helper()


class BrokenPythonKernel(Identity):
    kernels: ClassVar[Any] = {"cpu": eqxc.PythonKernel(broken_body)}


class BrokenBackward(Identity):
    def backward(self, ctx, grads, args, out, cotangents):
        helper()


class Poisoned(Broken):
    on_error = "poison"


class PoisonedBackward(BrokenBackward):
    on_error = "poison"


def loss(layer):
    return lambda x: layer(x).sum()


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
    assert lines[2].startswith(f'  File "{__file__}"')
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


# Poison.


def poisoned(f, *args):
    """The results of a failing call, and the error that comes afterwards."""
    results = []
    with pytest.raises(eqxc.KernelError) as caught, eqxc.raising():
        results.append(jax.block_until_ready(f(*args)))
    (result,) = results
    return result, caught.value


@pytest.mark.parametrize("jit", [False, True])
def test_poison(jit):
    f = Poisoned()
    got, error = poisoned(jax.jit(f.__call__) if jit else f, X)
    assert np.isnan(got).all()
    assert isinstance(error.original, Oops)
    assert error.__cause__ is error.original
    assert error.layer == "Poisoned"
    assert error.operands == "(float32[3]) -> (float32[3])"
    assert "poisoned its results" in str(error)
    assert "eqxcallback/layer" not in str(error)
    with eqxc.raising():  # once
        pass


def test_the_end_of_a_barrier():
    assert np.isnan(Poisoned()(X)).all()
    with pytest.raises(eqxc.KernelError, match="poisoned its results"):
        eqxc.debug.barrier_wait()
    eqxc.debug.barrier_wait()  # once


@pytest.mark.parametrize("jit", [False, True])
def test_poison_of_gradients(jit):
    f = jax.grad(loss(PoisonedBackward()))
    got, error = poisoned(jax.jit(f) if jit else f, X)
    assert np.isnan(got).all()
    assert error.layer == "PoisonedBackward"
    assert error.operands == "(float32[3], float32[3], float32[3]) -> (float32[3])"
    got, _ = poisoned(jax.vmap(jax.grad(loss(PoisonedBackward()))), X[None])
    assert np.isnan(got).all()


def test_poison_of_others():
    """What a failing kernel has written already, in whatever tree, is overwritten."""

    class Half(eqxc.Layer):
        vmap_method = "fold"
        on_error = "poison"

        def kernel(self, ctx, out, x):
            np.asarray(out["a"])[...] = 1
            np.asarray(out["n"])[...] = 1
            raise Oops

        def reference(self, x):
            return {"a": x, "n": jnp.zeros((2,), jnp.int32), "b": (x > 0, None), "z": x.astype(jnp.complex64)}

    got, _ = poisoned(Half(), X)
    assert np.isnan(got["a"]).all()
    assert np.isnan(got["z"]).all()
    assert not got["n"].any()
    assert not got["b"][0].any()


DTYPES = {
    **dict.fromkeys(["float16", "float32", "bfloat16", "complex64"], True),
    **dict.fromkeys(["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu", "float8_e3m4"], True),
    **dict.fromkeys(["float4_e2m1fn", "int32", "uint8", "bool", "int4", "uint4", "int2"], False),
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_of_poison(name):
    class AnyType(Poisoned):
        def kernel(self, ctx, out, x):
            np.asarray(out)[...] = 1
            raise Oops

    x = np.ones(3).astype(getattr(ml_dtypes, name, name))
    got, _ = poisoned(AnyType(), jnp.asarray(x))
    assert got.dtype == x.dtype
    got = np.asarray(got)
    assert np.isnan(got.astype(np.complex64)).all() if DTYPES[name] else not got.astype(np.float32).any()


def test_a_result_of_a_poisoned_kernel_is_no_none():
    class Returns(Identity):
        on_error = "poison"

        def kernel(self, ctx, out, x) -> Any:
            np.asarray(out)[...] = 1
            return 3

    got, error = poisoned(Returns(), X)
    assert np.isnan(got).all()
    assert "must return None" in str(error)


def test_a_working_kernel_is_not_poisoned():
    class Fine(Identity):
        on_error = "poison"

    with eqxc.raising():
        np.testing.assert_array_equal(Fine()(X), X)
        np.testing.assert_array_equal(jax.grad(loss(Fine()))(X), np.ones(3))


def test_the_first_of_several_is_raised_and_the_others_are_forgotten():
    class Numbered(Poisoned):
        number: int

        def kernel(self, ctx, out, x):
            raise Oops(f"number {self.number}")

    with pytest.raises(eqxc.KernelError, match="number 0"), eqxc.raising():
        [Numbered(i)(X) for i in range(100)]
    with eqxc.raising():
        pass


# Kernels that are wrong in other ways.


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


def test_an_error_of_a_reference():
    class Reference(Broken):
        def kernel(self, ctx, out, x):
            np.copyto(np.asarray(out), np.asarray(x))

        def reference(self, x):
            raise Oops("of the reference")

    for f in (Reference(), jax.jit(Reference().__call__), jax.vmap(Reference())):
        for _ in range(2):
            with pytest.raises(Oops, match="of the reference"):
                f(X)


class Scale(eqxc.Layer):
    weight: Any
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.multiply(x, self.weight, out=np.asarray(out))

    def reference(self, x, *, power=1):
        return x * self.weight**power


@pytest.mark.parametrize(
    ("call", "error", "text", "note"),
    [
        (lambda: Scale(jnp.ones(3))("a"), TypeError, "", "called with ('a')."),
        (lambda: jax.jit(Scale(jnp.ones(3)).__call__)(jnp.ones(4)), TypeError, "shapes", "called with (float32[4])."),
        (lambda: Scale(jnp.ones(3))([1, X]), TypeError, "", "called with ([1, float32[3]])."),
    ],
)
def test_an_error_of_a_reference_says_whose_it_is(call, error, text, note):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
    assert f"Scale: its reference failed, {note}" in caught.value.__notes__


def test_an_error_of_an_out_type_says_whose_it_is():
    class Typed(Scale):
        def out_type(self, x):
            raise Oops("of the type")

    with pytest.raises(Oops) as caught:
        Typed(1.0)(X)
    assert str(caught.value) == "of the type"
    assert caught.value.__notes__ == [f"{Typed.__qualname__}: its out_type failed, called with (float32[3])."]


@pytest.mark.parametrize(
    ("layer", "x", "path"),
    [(Scale(X), np.array([object()]), "x"), (Scale(np.array(["a"])), X, r"self\.weight")],
)
def test_arrays_that_are_none_of_jax(layer, x, path):
    with pytest.raises(
        TypeError, match=rf"^Scale: expected {path} to be an array .*; got ndarray of dtype .*\. No kernel"
    ):
        layer(x)
