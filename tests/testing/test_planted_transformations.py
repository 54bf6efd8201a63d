"""Layers that are right when they are called, and wrong in one transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.testing import check

from ..layers import Scale
from .catching import caught_by, failures
from .layers import Dense, NoReference, dense, normal, scale


# vmap.


class WrongAxis(eqxc.Layer):
    """Counts axes from the front."""

    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.asarray(out)[...] = np.asarray(x).sum(0)

    def reference(self, x):
        return x.sum(0)


def test_an_axis_counted_from_the_front():
    row = next(row for row in failures(WrongAxis(), normal(1, 3, 3)) if row.name != "outputs written")
    assert row.name == "vmap"
    assert "args[0] mapped along axis 0" in row.detail


class WrongOrder(Scale):
    """Right under one `vmap`."""

    vmap_method = "broadcast_all"

    def kernel(self, ctx, out, x):
        y = np.asarray(x) * np.asarray(self.weight)
        if y.ndim > 2:
            y = y.swapaxes(0, 1).reshape(y.shape)
        np.asarray(out)[...] = y


def test_axes_of_nested_maps_in_the_wrong_order():
    caught_by("nested vmap", *scale(WrongOrder))


class WrongTiles(Scale):
    """Takes it that what is mapped is the argument."""

    def kernel(self, ctx, out, x):
        weight = np.asarray(self.weight)
        np.multiply(x, weight if weight.ndim == 1 else weight[0], out=np.asarray(out))


def test_an_array_of_the_layer_is_mapped():
    row = caught_by("vmap", *scale(WrongTiles))
    assert row.detail.splitlines()[0].startswith("self.weight mapped along axis 0")


class NotEmpty(Dense):
    """XLA calls no kernel that has nothing to write. A sum over nothing is to be written."""

    @staticmethod
    def add(grad, value):
        if grad is not None:
            grad = np.asarray(grad)
            grad[...] = value[0] + value[1:].sum(0) if value.ndim > grad.ndim else value


class NotOdd(Scale):
    """In blocks of eight examples; the rest of more than one block is forgotten."""

    def kernel(self, ctx, out, x):
        super().kernel(ctx, out, x)
        if len(np.asarray(out)) > 16:
            np.asarray(out)[16:] = 0


def test_sizes():
    assert "0 examples" in caught_by("zero size", *dense(NotEmpty)).detail
    assert "17 examples" in caught_by("odd shapes", *scale(NotOdd)).detail


# Derivatives.


class WrongGradient(Dense):
    def backward(self, ctx, grads, args, out, cotangents):
        super().backward(ctx, grads, args, out, cotangents)
        if grads[0].bias is not None:
            np.asarray(grads[0].bias)[...] *= np.float32(1.01)


class ForgetsCotangent(Dense):
    def backward(self, ctx, grads, args, out, cotangents):
        first, _ = cotangents
        super().backward(ctx, grads, args, out, (first, np.zeros((*first.shape[:-1], 1), first.dtype)))


class NeedsAll(Dense):
    def backward(self, ctx, grads, args, out, cotangents):
        super().backward(ctx, grads, args, out, cotangents)
        np.asarray(grads[0].weight)[...] += np.asarray(grads[0].weight) * 0
        grads[1].shape  # noqa: B018 - there is no such thing if it is not needed


class NeverSums(Dense):
    @staticmethod
    def add(grad, value):
        if grad is not None:
            grad = np.asarray(grad)
            grad[...] = value[:1].sum(0) if value.ndim > grad.ndim else value


class AlwaysSums(Dense):
    @staticmethod
    def add(grad, value):
        if grad is not None:
            grad = np.asarray(grad)
            grad[...] = value.sum(0) if value.ndim > (1 if value.shape[-1] == 4 else 2) else value


class WrongReferenceDerivative(Scale):
    def reference(self, x):
        return wrong_square(x) * self.weight

    def kernel(self, ctx, out, x):
        np.asarray(out)[...] = np.asarray(x) * np.asarray(x) * np.asarray(self.weight)


@jax.custom_jvp
def wrong_square(x):
    return x * x


@wrong_square.defjvp
def _(primals, tangents):
    return primals[0] * primals[0], primals[0] * tangents[0]


class WrongWithoutReference(NoReference):
    def backward(self, ctx, grads, args, out, cotangents):
        super().backward(ctx, grads, args, out, cotangents)
        if grads[1] is not None:
            np.asarray(grads[1])[...] *= np.float32(1.1)


class NanWithoutReference(NoReference):
    def backward(self, ctx, grads, args, out, cotangents):
        super().backward(ctx, grads, args, out, cotangents)
        if grads[1] is not None:
            np.asarray(grads[1])[..., 0] = np.nan


class WrongTangent(Scale):
    def jvp(self, args, tangents):
        return args[0] * tangents.self.weight + self.weight * tangents[0] * 1.01


class WrongSecond(Scale):
    """The first derivative of the rule is right."""

    def kernel(self, ctx, out, x):
        np.asarray(out)[...] = np.asarray(x) * np.asarray(x) * np.asarray(self.weight)

    def reference(self, x):
        return x * x * self.weight

    def jvp(self, args, tangents):
        slope = 2 * jax.lax.stop_gradient(args[0] * self.weight)
        return args[0] * args[0] * tangents.self.weight + slope * tangents[0]


@pytest.mark.parametrize(
    ("planted", "name", "message"),
    [
        (dense(WrongGradient), "grad", "the gradient of self.bias"),
        (dense(ForgetsCotangent), "grad", "the gradient of args[0]"),
        (dense(NeedsAll), "partial grads", "NoneType"),
        (dense(NeverSums), "grad of vmap", "arguments mapped, the gradient"),
        (
            dense(AlwaysSums),
            "vmap of grad",
            "the gradient of self.bias against the gradients one by one (a batch of 3 in front, which self.bias has not: a "
            "gradient for each example, not their sum)",
        ),
        (scale(WrongReferenceDerivative), "finite differences", "the slope along args[0]"),
        (
            (WrongWithoutReference(normal(1, 3)), normal(2, 3)),
            "finite differences",
            "the slope along args[0]",
        ),
        (
            (NanWithoutReference(normal(1, 3)), normal(2, 3)),
            "finite differences",
            "the slope along args[0]: 1 of 1 elements differ, most: got nan",
        ),
        (scale(WrongSecond), "hessian", "over reverse"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value[0]).__name__,
)
def test_a_wrong_derivative(planted, name, message):
    row = caught_by(name, *planted)
    assert message in row.detail


def test_a_wrong_tangent():
    assert {"grad", "jvp"} <= {row.name for row in failures(*scale(WrongTangent))}


class NanTangent(eqxc.Layer):
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.sin(np.asarray(x), out=np.asarray(out))

    def out_type(self, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def jvp(self, args, tangents):
        return tangents[0] * np.float32(np.nan)


def test_a_tangent_that_is_no_number():
    rows = failures(NanTangent(), normal(2, 3), only=["finite differences", "jvp"])
    assert [row.name for row in rows] == ["finite differences", "jvp"]
    assert all("got nan" in row.detail for row in rows)


def test_no_number_where_nothing_is_smooth_is_no_fault():
    assert check(jnp.sqrt, jnp.array([0.0, 1.0]), only=["finite differences", "jvp", "hessian"]).passed
