"""Triton as a compiler, in this process, and as an interpreter, in another."""

import pytest


@pytest.fixture(scope="session")
def interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    from .interpreter import Interpreter

    made = Interpreter()
    yield made
    made.close()


@pytest.fixture(scope="session")
def triton_cache(tmp_path_factory):
    """Kernels are compiled once in a session, and for this session only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield
