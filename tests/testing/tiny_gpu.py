"""A library for GPUs on the fake driver, as small as one can be, and layers that use it."""

import ctypes
from typing import Any

import numpy as np

import eqxcallback as eqxc


LEGACY, OTHER = 0, 0xABC  # no stream of the driver's own: what is enqueued on it runs at once


class DriverFailed(RuntimeError):
    pass


class Gpu:
    """A library for GPUs, as small as one can be: its functions raise the driver's errors."""

    library: Any = None

    def call(self, name, *args):
        code = getattr(self.library, name)(*args)
        if code != 0:
            raise DriverFailed(f"{name} returned {code}")

    def copy(self, to, source, stream):
        size = ctypes.c_size_t(source.nbytes)
        self.call("cuMemcpyDtoDAsync_v2", _pointer(to), _pointer(source), size, ctypes.c_void_p(stream))

    def fill(self, to, value, stream):
        self.call("cuMemsetD8Async", _pointer(to), value, ctypes.c_size_t(to.nbytes), ctypes.c_void_p(stream))

    def read(self, source):
        value = np.empty(source.shape, source.dtype)
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(value.ctypes.data), _pointer(source), source.nbytes)
        return value

    def allocate(self):
        self.call("cuMemAlloc_v2", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(16))

    def allocate_on(self, stream):
        memory = ctypes.c_void_p()
        self.call("cuMemAllocAsync", ctypes.byref(memory), ctypes.c_size_t(16), ctypes.c_void_p(stream))

    def synchronize(self, stream):
        self.call("cuStreamSynchronize", ctypes.c_void_p(stream))


def _pointer(buffer):
    return ctypes.c_void_p(buffer.__cuda_array_interface__["data"][0])


gpu = Gpu()


class Copy(eqxc.Layer):
    """On a GPU a copy on XLA's stream. A program of a CPU calls it as on one, to see what the replay has to compute."""

    vmap_method = "fold"

    command_buffer_compatible = True

    def kernel(self, ctx, out, x):
        if ctx.platform == "cpu":
            np.asarray(out)[...] = np.asarray(x)
        else:
            self.launch(ctx, out, x)

    def launch(self, ctx, out, x):
        gpu.copy(out, x, ctx.stream)

    def reference(self, x):
        return x * 1


class WithBackward(Copy):
    def backward(self, ctx, grads, args, out, cotangents):
        if ctx.platform == "cpu":
            np.asarray(grads[1])[...] = np.asarray(cotangents)
        else:
            self.launch_backward(ctx, grads[1], cotangents)

    def launch_backward(self, ctx, grad, cotangent):
        gpu.copy(grad, cotangent, ctx.stream)
