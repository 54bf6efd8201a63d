"""Kernels in Triton. Importing one needs Triton, so the library does that only when it compiles one."""
