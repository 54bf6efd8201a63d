"""Triton as a compiler, in this process, and as an interpreter, in another."""

import pytest


def pytest_itemcollected(item):
    item.add_marker("any_jax_version")
    item.add_marker("compilers")


@pytest.fixture(scope="session")
def interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    from .interpreter import interpret

    return interpret


@pytest.fixture(scope="session")
def triton_cache(tmp_path_factory):
    """Kernels are compiled once in a session, and for this session only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield
