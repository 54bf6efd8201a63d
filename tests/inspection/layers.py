"""Layers that several tests use."""

import numpy as np

import eqxcallback as eqxc

from .. import layers


class Scale(layers.Scale):
    """With a backward kernel."""

    def backward(self, ctx, grads, args, out, cotangents):
        d_self, d_x = grads
        if d_self.weight is not None:
            np.multiply(args[0], cotangents, out=np.asarray(d_self.weight))
        if d_x is not None:
            np.multiply(self.weight, cotangents, out=np.asarray(d_x))


class AddOne(eqxc.Layer):
    """In place. `addresses` are those that it has written to."""

    vmap_method = "fold"

    addresses = []  # noqa: RUF012
    input_output_aliases = {"x": 0}  # noqa: RUF012

    def kernel(self, ctx, out, x):
        array = np.asarray(out)
        self.addresses.append(array.ctypes.data)
        array += np.ones((), array.dtype)

    def reference(self, x):
        return x + np.ones((), x.dtype)
