"""The GPU handler of the python lane, called on host memory as XLA calls it on a GPU."""

import ctypes

import numpy as np

from eqxcallback import _ext


# As XLA numbers them.
F32, F64, BF16, S4 = 11, 12, 16, 21
OK, UNIMPLEMENTED, INTERNAL = 0, 12, 13


def handler(target):
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(get_pointer(_ext.python_call_targets()[target]["CUDA"], None))


def run_on_fake_gpu(fake_xla, callback, x, dtype, *, target="eqxcallback_python", stream=0xABC0, ordinal=3, shape=None):
    """(error code, message, result) of a callback over `x`, called by the GPU handler."""
    handle = _ext.Handle(7, callback, direct=True)
    out = np.zeros_like(x)
    shape = x.shape if shape is None else shape
    dims = (ctypes.c_int64 * len(shape))(*shape)
    message = ctypes.create_string_buffer(4096)
    code = fake_xla.call(
        handler(target),
        ctypes.c_uint64(handle.key),
        dtype,
        ctypes.c_void_p(x.ctypes.data),
        ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int64(len(shape)),
        dims,
        ctypes.c_size_t(stream),
        ctypes.c_int32(ordinal),
        message,
        ctypes.c_size_t(len(message)),
    )
    return code, message.value.decode(), out
