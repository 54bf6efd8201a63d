"""Triton as a compiler, in this process, and as an interpreter, in another."""

import dataclasses
import importlib

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


@pytest.fixture
def on_triton(monkeypatch):
    """`ops.attention` runs the kernels in Triton on a CPU."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from eqxcallback.kernel._emulated import emulated
    from eqxcallback.ops.attention import _triton

    attention = importlib.import_module("eqxcallback.ops.attention._attention")
    kernels, backward = {"cpu": emulated(_triton.ATTENTION)}, {"cpu": emulated(_triton.ATTENTION_BACKWARD)}
    op = dataclasses.replace(attention._attention, kernels=kernels, backward=backward)
    monkeypatch.setattr(attention, "_attention", op)


@pytest.fixture
def interpreted(on_triton, monkeypatch):
    """They run in tiles of 16: some see nothing, some all, and the last are not full."""
    from eqxcallback.ops.attention import _triton_tiles as tiles

    from ..ops import table

    choice = tiles._choice

    def small(tile, size, **more):
        chosen = choice(tile, size, **more)
        return dataclasses.replace(chosen, constants=chosen.constants | {"BLOCK_QUERIES": 16, "BLOCK_KEYS": 16})

    monkeypatch.setattr(tiles, "_choice", small)
    table.quickly_compiled.cache_clear()
    yield
    table.quickly_compiled.cache_clear()
