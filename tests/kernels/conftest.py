"""Kernels for GPUs, on the CPU."""


def pytest_itemcollected(item):
    item.add_marker("any_jax_version")
