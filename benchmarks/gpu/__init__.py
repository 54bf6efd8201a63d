"""What the kernels do on a GPU, and what checks and explains it there: `python -m benchmarks.gpu`."""
