"""An op and a layer with kernels in a library of a user's: another process imports this."""

import os

import jax

import eqxcallback as eqxc


KERNELS = {"cpu": eqxc.NativeKernel("Saxpy", os.environ["EQXCALLBACK_TEST_LIBRARY"], attributes=("a",))}
saxpy = eqxc.Op("saxpy", KERNELS, lambda x, y, *, a: a * x + y)


class Saxpy(eqxc.Layer):
    shift: jax.Array
    kernels = KERNELS

    def reference(self, x, *, a):
        return a * self.shift + x
