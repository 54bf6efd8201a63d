"""Layers that several tests use."""

import functools
import pathlib
import tempfile
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc

from ..transform.library import build


_built = tempfile.TemporaryDirectory()

# The library of native.cc. Kernels may name it before it is there.
NATIVE = pathlib.Path(_built.name) / "libnative.so"


@functools.cache
def build_native():
    build(NATIVE, str(pathlib.Path(__file__).parent / "native.cc"))


# What the kernels of these layers have done: "forward", "backward".
calls: list[str] = []


def struct(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


class Identity(eqxc.Layer):
    """The identity of any type."""

    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.copyto(np.asarray(out), np.asarray(x))

    def reference(self, x):
        return x


class Wave(eqxc.Layer):
    """`sin(x) * weight ** power`, with a kernel for everything that can have one."""

    weight: jax.Array
    power: int = eqx.field(static=True, default=2)
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        calls.append("forward")
        np.asarray(out)[...] = np.sin(np.asarray(x)) * np.asarray(self.weight) ** self.power

    def reference(self, x):
        return jnp.sin(x) * self.weight**self.power

    def backward(self, ctx, grads, args, out, cotangents):
        calls.append("backward")
        d_self, dx = grads
        x, weight, cotangent = np.asarray(args[0]), np.asarray(self.weight), np.asarray(cotangents)
        if dx is not None:
            dx.write(cotangent * np.cos(x) * weight**self.power)
        if d_self.weight is not None:
            d_self.weight.write(cotangent * np.sin(x) * self.power * weight ** (self.power - 1))


class NativeWave(Wave):
    """Its forward kernel is in C++."""

    kernels: ClassVar[Any] = {"cpu": eqxc.NativeKernel("Wave", NATIVE, attributes=("power",))}


class ReferenceWave(eqxc.Layer):
    """Its derivatives are those of the reference."""

    weight: jax.Array
    power: int = eqx.field(static=True, default=2)
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        calls.append("forward")
        np.asarray(out)[...] = np.sin(np.asarray(x)) * np.asarray(self.weight) ** self.power

    def reference(self, x):
        return jnp.sin(x) * self.weight**self.power


class PureWave(eqx.Module):
    """The function that the others are compared with."""

    weight: jax.Array
    power: int = eqx.field(static=True, default=2)

    def __call__(self, x):
        return jnp.sin(x) * self.weight**self.power


WAVES = {"python": Wave, "native": NativeWave, "reference": ReferenceWave}

X = np.array([0.3, -0.7, 1.2], np.float32)
W = np.array([0.5, 1.1, -0.4], np.float32)


def values(*sizes, dtype: Any = np.float32):
    """No two alike, of both signs, none of them large."""
    return (np.sin(1 + np.arange(np.prod(sizes, dtype=int))).reshape(sizes) * 1.5).astype(dtype)


def assert_close(got, want, tolerance=1e-5):
    """Trees of arrays, of which two types may differ in the class of a Module."""
    got_leaves, want_leaves = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got_leaves) == len(want_leaves)
    for g, w in zip(got_leaves, want_leaves, strict=True):
        assert jnp.shape(g) == jnp.shape(w)
        assert jnp.result_type(g) == jnp.result_type(w)
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)


def compiled(f, *args):
    """`jit`, with little optimisation: that is what takes long."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})(*args)


def lowered(f, *args, platform="cpu"):
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()
