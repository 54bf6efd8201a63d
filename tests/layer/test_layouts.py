"""Kernels that want their arrays column-major: they see them so, and XLA need not copy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc


SEEN = []
A, B = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 4)


class ColumnMajor(eqxc.Layer):
    """`a @ b`: `a` and the result are column-major."""

    scale: jax.Array
    vmap_method = "fold"
    input_layouts = ((1, 0), None)
    output_layouts = ((1, 0),)

    def kernel(self, ctx, out, a, b):
        SEEN.append([(buffer.shape, buffer.strides) for buffer in (a, b, out)])
        assert np.from_dlpack(a).strides == a.strides
        np.testing.assert_array_equal(np.from_dlpack(a, copy=True), np.asarray(a))
        assert np.asarray(a).strides == a.strides
        np.matmul(np.asarray(a), np.asarray(b) * np.asarray(self.scale), out=np.asarray(out))

    def reference(self, a, b):
        return a @ (b * self.scale)


LAYER = ColumnMajor(jnp.asarray(2.0))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_values_and_strides(transform):
    np.testing.assert_array_equal(transform(lambda a, b: LAYER(a, b))(A, B), A @ (B * 2))
    assert SEEN[-1] == [((2, 3), (4, 8)), ((3, 4), (16, 4)), ((2, 4), (4, 8))]


def test_axes_of_vmap_are_the_most_major_ones():
    stacked = jnp.stack([A, 2 * A, 3 * A])
    np.testing.assert_array_equal(
        jax.vmap(LAYER, (0, None))(stacked, B), jax.vmap(LAYER.reference, (0, None))(stacked, B)
    )
    assert SEEN[-1] == [((3, 2, 3), (24, 4, 8)), ((3, 4), (16, 4)), ((3, 2, 4), (32, 4, 8))]


def test_derivatives():
    def loss(f):
        return lambda a, b: (f(a, b) ** 2).sum()

    got, expected = (jax.grad(loss(f), (0, 1))(A, B) for f in (LAYER, LAYER.reference))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_what_xla_computes_is_not_copied():
    """It is written column-major at once: one fusion makes it of the argument."""
    compiled = jax.jit(lambda a, b: LAYER(jnp.sin(a), b)).lower(A, B).compile()
    text = compiled.as_text()
    assert text is not None
    (operands,) = re.findall(r"custom-call\((.*?)\)", text)
    matrix = re.escape(operands.split(", ")[1])
    assert re.search(matrix + r" = f32\[2,3\]\{0,1\} fusion\(%a", text), text
    np.testing.assert_allclose(compiled(A, B), jnp.sin(A) @ (B * 2), rtol=1e-6)


def test_three_axes():
    class Three(eqxc.Layer):
        vmap_method = "fold"
        input_layouts = ((2, 0, 1),)

        def kernel(self, ctx, out, x):
            assert x.strides == (4 * 3, 4, 4 * 3 * 2)
            out.write(np.asarray(x))

        def out_type(self, x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)

    x = jnp.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(jax.jit(Three())(x), x)


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        (((0, 0), None), r"expected the axes of float32\[2,3\] from major to minor, each once; got \(0, 0\)"),
        (((1, 0, 2),), r"got \(1, 0, 2\)"),
        ((None, None, (0,)), r"expected a layout for each of 2 arrays; got 3"),
    ],
)
def test_wrong_layouts(layouts, message):
    class Wrong(ColumnMajor):
        input_layouts = layouts

    with pytest.raises(ValueError, match=r"Wrong\.input_layouts: .*" + message):
        Wrong(LAYER.scale)(A, B)


def test_packed_types_are_row_major_only():
    class Packed(eqxc.Layer):
        vmap_method = "fold"
        input_layouts = ((1, 0),)

        def kernel(self, ctx, out, x):
            out.write(np.asarray(x))

        def out_type(self, x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)

    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="packed types are row-major only"):
        jax.block_until_ready(jax.jit(Packed())(jnp.ones((2, 4), jnp.int4)))
