"""Measures of growth, and a caller of the handler of GPUs."""

import gc

import pytest

from ..callback.conftest import fake_xla as fake_xla


def pytest_itemcollected(item):
    item.add_marker("any_jax_version")


def resident():
    """Bytes of this process in memory, now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.fixture
def growth():
    """`growth(work)`: by how many bytes this process is larger after `work()`, which has run before."""

    def measure(work):
        work()
        gc.collect()
        before = resident()
        work()
        gc.collect()
        return resident() - before

    return measure
