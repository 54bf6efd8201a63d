"""Layers and functions that another process can import by name, as exported programs do."""

import os
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc


# Another body under the same name: what a cached program must not call the old one for.
FACTOR = np.float32(os.environ.get("EQXCALLBACK_TEST_FACTOR", "2"))


class Wave(eqxc.Layer):
    weight: jax.Array
    function: Callable[..., np.ndarray] = eqx.field(static=True, default=np.tanh)
    vmap_method = "fold"

    def kernel(self, ctx, out, x, *, scale=1.0):
        out.write(self.function(np.asarray(x) * np.asarray(self.weight)) * FACTOR * np.float32(scale))

    def reference(self, x, *, scale=1.0):
        return jnp.tanh(x * self.weight) * FACTOR * scale

    def backward(self, ctx, grads, args, out, cotangents):
        _, grad_x, _ = grads
        _, scale = args
        y = np.asarray(out) / (FACTOR * np.float32(scale))
        grad_x.write(np.asarray(cotangents) * (1 - y * y) * np.asarray(self.weight) * FACTOR * np.float32(scale))


def double(ctx, out, x, *, by):
    np.multiply(np.asarray(x["value"]), by, out=np.asarray(out["result"]))


multiply = eqxc.Op(
    "multiply", {"cpu": eqxc.PythonKernel(double)}, lambda x, *, by: {"result": x["value"] * by}, vmap_method="fold"
)


def add_one(ctx, out, x):
    np.add(np.asarray(x), 1, out=np.asarray(out))


LAYER = Wave(jnp.asarray([1.0, 2.0, 3.0]))


def program(x):
    """Layers forward and backward, an op of each lane, and a callback."""
    y = jax.vmap(lambda row: LAYER(row, scale=0.5))(x)
    gradient = jax.grad(lambda x: jax.vmap(LAYER)(x).sum())(x)
    z = multiply({"value": y}, by=3.0)["result"]
    return eqxc.buffer_callback(add_one, jax.ShapeDtypeStruct.like(z))(z) + gradient + eqxc.ops.rms_norm(x)
