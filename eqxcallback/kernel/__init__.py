"""What an external kernel is: pure data. Nothing here traces, compiles or runs."""

from ._native import NativeKernel as NativeKernel
