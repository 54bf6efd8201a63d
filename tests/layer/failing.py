"""Layers whose kernels fail."""

from typing import Any, ClassVar

import eqxcallback as eqxc

from .layers import Identity


class Oops(Exception):
    """Not an exception that anybody else raises."""


def helper():
    raise Oops("the kernel is broken")


class Broken(Identity):
    def kernel(self, ctx, out, x):
        helper()


def broken_body(ctx, out, layer, x):
    helper()


class BrokenPythonKernel(Identity):
    kernels: ClassVar[Any] = {"cpu": eqxc.PythonKernel(broken_body)}


class BrokenBackward(Identity):
    def backward(self, ctx, grads, args, out, cotangents):
        helper()


def loss(layer):
    return lambda x: layer(x).sum()
