"""Layers that tests of several folders use."""

import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc


class Scale(eqxc.Layer):
    """Ten lines, as a user writes them."""

    weight: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.multiply(x, self.weight, out=np.asarray(out))

    def reference(self, x):
        return x * self.weight


runs: list[str] = []  # of the kernel below


class Sine(eqxc.Layer):
    vmap_method = "broadcast_all"

    def kernel(self, ctx, out, x):
        runs.append("kernel")
        np.sin(np.asarray(x), out=np.asarray(out))

    def reference(self, x):
        return jnp.sin(x)
