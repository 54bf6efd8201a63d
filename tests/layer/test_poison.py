"""Kernels of layers that fail where `on_error` is "poison": what their results are, and when the error comes."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqxcallback as eqxc

from .failing import Broken, BrokenBackward, Oops, loss
from .layers import Identity, X


class Poisoned(Broken):
    on_error = "poison"


class PoisonedBackward(BrokenBackward):
    on_error = "poison"


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
    """Poison replaces what a failing kernel has written already, in whatever tree."""

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


def test_an_error_of_the_user_takes_the_poison_along():
    def fails():
        assert np.isnan(Poisoned()(X)).all()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught, eqxc.raising():
        fails()
    assert caught.value.__notes__ == ["Before that, Poisoned failed, and poisoned its results."]
    with eqxc.raising():
        pass


@pytest.mark.parametrize("jit", [False, True])
def test_a_ref_is_poisoned(jit):
    """It may be changed in part."""

    class Adds(eqxc.Layer):
        fails: bool
        on_error = "poison"

        def kernel(self, ctx, out, ref, x):
            np.asarray(ref)[:1] = 7
            if self.fails:
                raise Oops
            np.asarray(out)[...] = np.asarray(x)

        def reference(self, ref, x):
            ref[...] = ref[...] + x
            return x

    call = eqx.filter_jit if jit else lambda f: f
    ref = jax.new_ref(jnp.ones(3))
    got, error = poisoned(call(Adds(True)), ref, X)
    assert np.isnan(got).all()
    assert np.isnan(ref[...]).all()
    assert error.layer.endswith(".Adds")
    ref[...] = jnp.ones(3)
    with eqxc.raising():
        np.testing.assert_array_equal(call(Adds(False))(ref, X), X)
    np.testing.assert_array_equal(ref[...], [7, 1, 1])


def test_a_result_that_is_not_written_beside_a_ref():
    class Forgets(eqxc.Layer):
        on_error = "poison"

        def kernel(self, ctx, out, ref, x):
            pass

        def reference(self, ref, x):
            ref[...] = x
            return x

    got, error = poisoned(Forgets(), jax.new_ref(jnp.ones(3)), X)
    assert np.isnan(got).all()
    assert "never written" in str(error)
