"""Mistakes in a kernel of gradients: the error names it, and the gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc


X = np.arange(5, dtype=np.float32)


class Scale(eqxc.Layer):
    weights: Any
    vmap_method = "fold"

    def kernel(self, ctx, out, x, *, shift, add):
        np.copyto(np.asarray(out), np.asarray(x) * self.weights["w"] + np.asarray(shift) + np.asarray(add))

    def reference(self, x, *, shift, add):
        return x * self.weights["w"] + shift + add


def gradients(layer):
    def loss(layer, x, shift, add):
        return layer(x, shift=shift, add=add).sum()

    return jax.grad(loss, (0, 1, 2, 3))(layer({"w": jnp.asarray(X)}), X, 2 * X, 3 * X)


@pytest.mark.parametrize("on_error", ["raise", "poison"])
def test_a_gradient_that_nobody_wrote(on_error):
    class Leaves(Scale):
        def backward(self, ctx, grads, args, out, cotangents):
            _, d_x, _, d_add = grads
            d_x[...] = cotangents[...]
            d_add[...] = cotangents[...]

    with pytest.raises(eqxc.KernelError) as caught, eqxc.raising():
        gradients(type("Leaves", (Leaves,), {"on_error": on_error}))
    first, second = (
        f"{name}, float32[5]: 5 of 5 elements were never" for name in ("grads[0].weights['w']", "grads[2]")
    )
    assert f"Leaves.backward: {first} written, the first at (0,); {second} written" in str(caught.value)
    assert "Write each Buffer in grads, as in `grads[0][...] = value`" in str(caught.value)


@pytest.mark.parametrize("on_error", ["raise", "poison"])
def test_gradients_that_are_returned(on_error):
    class Returns(Scale):
        def backward(self, ctx, grads, args, out, cotangents):
            return cotangents, cotangents

    with pytest.raises(eqxc.KernelError) as caught, eqxc.raising():
        gradients(type("Returns", (Returns,), {"on_error": on_error}))
    text = "Returns.backward must return None, because gradients are what it writes; got tuple. Write each Buffer in grads: "
    assert f"{text}grads[0].weights['w'], grads[1], grads[2], grads[3]." in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "pull: grads[0]['a'], float32[5]: 5 of 5 elements were never written"),
        (
            (1,),
            "pull must return None, because gradients are what it writes; got tuple. Write each Buffer in grads: grads[0]['a'].",
        ),
    ],
)
def test_ops(returned, text):
    def pull(ctx, grads, args, out, cotangents):
        return returned

    @eqxc.op(reference=lambda tree, y: tree["a"] * y, backward=eqxc.PythonKernel(pull))
    def times(ctx, out, tree, y):
        np.multiply(tree["a"], y, out=np.asarray(out))

    with pytest.raises(eqxc.KernelError) as caught:
        jax.grad(lambda tree: times(tree, X).sum())({"a": X})
    assert text in str(caught.value)


def test_derivatives_of_a_backward_alone():
    """The remedy is what the layer lacks."""

    class Doubled(eqxc.Layer):
        def kernel(self, ctx, out, x):
            np.multiply(x, 2, out=np.asarray(out))

        def out_type(self, x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)

        def backward(self, ctx, grads, args, out, cotangents):
            np.multiply(cotangents, 2, out=np.asarray(grads[1]))

    text = r"`backward` is for the first derivative .*\. Define `reference` or `jvp` \(pure JAX\) in the layer\."
    for derive in (lambda x: jax.jvp(Doubled(), (x,), (x,)), jax.hessian(lambda x: Doubled()(x).sum())):
        with pytest.raises(ValueError, match=text):
            derive(X)

    class WithRule(Doubled):
        def jvp(self, args, tangents):
            return 2 * tangents[0]

    np.testing.assert_array_equal(jax.jvp(WithRule(), (X,), (X,))[1], 2 * X)
