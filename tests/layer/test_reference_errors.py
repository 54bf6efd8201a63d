"""References and result types of layers that fail, and arrays that JAX has none of: the error says whose it is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .failing import Oops
from .layers import Identity, X


def test_an_error_of_a_reference():
    class Reference(Identity):
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

    def reference(self, x):
        return x * self.weight


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


class Forgets(eqxc.Layer):
    def kernel(self, ctx, out, x):
        np.copyto(np.asarray(out), np.asarray(x))

    def reference(self, x):
        _ = 2 * x


def test_a_forgotten_return():
    """No kernel would run for a result without arrays."""

    class Types(eqxc.Layer):
        kernel = Forgets.kernel

        def out_type(self, x):
            jax.ShapeDtypeStruct(x.shape, x.dtype)

    for f in (Forgets(), jax.jit(Forgets().__call__), jax.vmap(Forgets())):
        with pytest.raises(TypeError, match=r"^Forgets: reference returned None; did it forget 'return'\?"):
            f(X)
    with pytest.raises(TypeError, match=r"Types: out_type returned None; did it forget 'return'\?"):
        Types()(X)
    assert type("Empty", (Forgets,), {"reference": lambda self, x: ()})()(X) == ()


def test_kernels_without_results():
    ran = []

    class Prints(Forgets):
        has_side_effect = True

        def kernel(self, ctx, out, x):
            ran.append(out)

    assert Prints()(X) is None
    assert ran == [None]

    class Adds(eqxc.Layer):
        def kernel(self, ctx, out, x, total):
            np.asarray(total)[...] += np.asarray(x)

        def reference(self, x, total):
            total[...] += x

    total = jax.new_ref(jnp.zeros(3))
    assert Adds()(X, total) is None
    np.testing.assert_array_equal(total[...], X)
