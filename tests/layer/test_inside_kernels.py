"""Layers and ops that a kernel of a layer uses: by their kernels, or on arrays."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .layers import X, struct


class Scale(eqxc.Layer):
    weight: Any

    def kernel(self, ctx, out, x):
        np.multiply(x, self.weight, out=np.asarray(out))

    def reference(self, x):
        return x * self.weight


@eqxc.op(reference=lambda x: 2 * x)
def double(ctx, out, x):
    np.multiply(x, 2, out=np.asarray(out))


def outer(kernel, inner):
    class Outer(eqxc.Layer):
        inner: Any

        def out_type(self, x):
            return struct(x)

    return type("Outer", (Outer,), {"kernel": kernel})(inner)


CALLED = r"expected arrays; called inside a kernel with a Buffer"


@pytest.mark.parametrize(
    ("kernel", "weight", "text"),
    [
        (lambda self, ctx, out, x: self.inner(x), jnp.asarray(X), rf"Scale: {CALLED}, self\.weight\. Call the kernel"),
        (lambda self, ctx, out, x: self.inner(x), 2.0, rf"Scale: {CALLED}, x\. .* of a layer, self\.inner\.kernel\("),
        (
            lambda self, ctx, out, x: double(x),
            2.0,
            rf"Op\(double\): {CALLED}, x\. Call the function of its kernel, or pass",
        ),
    ],
)
def test_a_call_with_a_buffer(kernel, weight, text):
    with pytest.raises(eqxc.KernelError, match=text) as caught:
        outer(kernel, Scale(weight))(jnp.asarray(X))
    assert type(caught.value.original) is TypeError
    assert not getattr(caught.value.original, "__notes__", None)  # no reference is blamed


@pytest.mark.parametrize(
    ("kernel", "weight"),
    [
        (lambda self, ctx, out, x: self.inner.kernel(ctx, out, x), jnp.asarray([2.0, 2.0, 2.0])),
        (lambda self, ctx, out, x: out.write(self.inner(x[...])), 2.0),
        (lambda self, ctx, out, x: out.write(double(x[...])), 2.0),
    ],
)
def test_what_to_do_instead(kernel, weight):
    np.testing.assert_array_equal(outer(kernel, Scale(weight))(jnp.asarray(X)), 2 * X)
