"""What a kernel is: pure data. Nothing here traces, compiles or runs."""

from ._native import NativeKernel as NativeKernel
from ._python import PythonKernel as PythonKernel


Kernel = NativeKernel | PythonKernel
