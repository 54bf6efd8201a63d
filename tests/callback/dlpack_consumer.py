"""A consumer of DLPack, written from its ABI: what it understands of a capsule is what the capsule says."""

import ctypes
from typing import NamedTuple

import ml_dtypes
import numpy as np


# DLDataTypeCode and bits, as dlpack.h numbers them.
DTYPES = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (5, 64): "complex64",
    (5, 128): "complex128",
    (6, 8): "bool",
    (7, 8): "float8_e3m4",
    (8, 8): "float8_e4m3",
    (9, 8): "float8_e4m3b11fnuz",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
    (14, 8): "float8_e8m0fnu",
}


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


class Taken(NamedTuple):
    array: np.ndarray  # the very memory; not to be used after `release`
    read_only: bool
    device: tuple[int, int]


def take(capsule):
    """Return what a capsule holds, and a function that lets go of it."""
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.argtypes = api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
    versioned = bool(api.PyCapsule_IsValid(capsule, b"dltensor_versioned"))
    name, used = (b"dltensor_versioned", USED_VERSIONED) if versioned else (b"dltensor", USED)
    address = api.PyCapsule_GetPointer(capsule, name)
    managed = (Versioned if versioned else Managed).from_address(address)
    api.PyCapsule_SetName(capsule, used)  # it is ours now: the capsule must not delete it
    tensor = managed.tensor
    assert tensor.lanes == 1
    name = DTYPES[tensor.code, tensor.bits]
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(stride * dtype.itemsize for stride in tensor.strides[: tensor.ndim])
    size = max(1, int(np.prod(shape))) * dtype.itemsize
    memory = (ctypes.c_uint8 * size).from_address(tensor.data + tensor.byte_offset)
    array = np.ndarray(shape, dtype, memoryview(memory), strides=strides)
    read_only = bool(managed.flags & 1) if isinstance(managed, Versioned) else False
    return Taken(array, read_only, (tensor.device_type, tensor.device_id)), lambda: managed.deleter(address)


# A capsule does not own its name.
USED, USED_VERSIONED = b"used_dltensor", b"used_dltensor_versioned"
