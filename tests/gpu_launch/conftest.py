"""The launcher on a driver without a GPU, and kernels of which nothing is compiled."""

import gc
import re

import jax
import pytest

from eqxcallback import xla
from eqxcallback.backends import _cuda, _nvrtc

from .. import cuda12
from ..software_gpu.compiler import SoftwareCompiler
from ..software_gpu.driver import Driver


def pytest_itemcollected(item):
    item.add_marker("any_jax_version")
    if "own_cache" in item.fixturenames:
        item.add_marker("compilers")


class NoCompiler:
    """An image that only says what it was made of."""

    version = (13, 0)
    archs = (80, 90, 100)

    def __init__(self):
        self.compiled = []

    def compile(self, source, name, options, entries, is_cubin):
        self.compiled.append((source, options, entries, is_cubin))
        count = re.search(r"count<.*>::value == (\d+)", source)
        assert count is not None
        fits = re.findall(r"::(pointee|scalar)<.*>::fits\((-?\d+), (\d+)\)", source)
        sizes = ",".join("8" if kind == "pointee" else size for kind, _, size in fits[: int(count[1])])
        return (
            f"image {count[1]}:{sizes} {hash(source)} {options[0]}".encode(),
            [f"{entry}_lowered" for entry in entries],
            "",
        )


@pytest.fixture(scope="session")
def fake_driver():
    yield Driver()
    xla.launch_with("")  # the system's


@pytest.fixture
def driver(fake_driver):
    fake_driver.reset()
    yield fake_driver
    fake_driver.reset()


@pytest.fixture(params=cuda12.COMPILERS)
def own_cache(request, monkeypatch, tmp_path):
    """A real compiler, with nothing compiled yet."""
    cuda12.use(request.param, monkeypatch)
    monkeypatch.setenv("EQXCALLBACK_CACHE_DIR", str(tmp_path / "cache"))
    _cuda.compiled_source.cache_clear()


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    stand_in = NoCompiler()
    monkeypatch.setattr(_nvrtc, "find", lambda: stand_in)
    monkeypatch.setenv("EQXCALLBACK_CACHE_DIR", str(tmp_path))
    forget()
    yield stand_in
    forget()


@pytest.fixture
def software_gpu(driver, monkeypatch, tmp_path):
    """A GPU in software: kernels in CUDA C++ run on the CPU, launched as on a GPU."""
    stand_in = SoftwareCompiler()
    monkeypatch.setattr(_nvrtc, "find", lambda: stand_in)
    monkeypatch.setenv("EQXCALLBACK_CACHE_DIR", str(tmp_path))
    forget()
    yield driver
    forget()


def forget():
    _cuda.compiled_source.cache_clear()
    jax.clear_caches()
    gc.collect()
