"""Measure the kernels on a GPU, and check and explain the figures there: `python -m benchmarks.gpu`."""
