"""A NumPy array as Triton's interpreter wants its tensors: a torch tensor, of which it uses this much."""

import numpy as np


class Storage:
    """Memory of the host, which is the device: there is nothing to copy."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def data_ptr(self):
        return self.array.ctypes.data

    def cpu(self):
        return self

    def copy_(self, other):
        assert self.data_ptr() == other.data_ptr()


class NumpyTensor:
    device = "cpu"

    def __init__(self, array: np.ndarray):
        assert array.flags.c_contiguous
        self.array = array
        self.dtype = array.dtype.name  # also "bfloat16", where the dtype is of ml_dtypes
        self.shape = array.shape

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return Storage(self.array)

    def storage_offset(self):
        return 0

    def size(self):
        return self.shape

    def stride(self):
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def new_empty(self, *_, **__):
        return NumpyTensor(self.array)

    def set_(self, storage, *_):
        self.array = storage.array
