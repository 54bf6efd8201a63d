import builtins
import importlib

import pytest

import eqxcallback as eqxc
from eqxcallback.backends import _nvrtc


@pytest.fixture(autouse=True)
def _finds_anew():
    _nvrtc.find.cache_clear()
    yield
    _nvrtc.find.cache_clear()


def test_what_needs_no_gpu_is_there():
    found = eqxc.available_backends()
    assert list(found) == ["python", "native", "cuda", "triton", "cupy", "emulation"]
    assert found["python"] is True
    assert found["native"] is True


def test_without_a_driver(driver):
    driver.remove()
    found = eqxc.available_backends()
    assert "there is no CUDA driver: /nowhere.so" in str(found["cuda"])


def test_with_a_driver(driver, monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    monkeypatch.setattr(_nvrtc, "find", lambda: None)
    assert set(eqxc.available_backends().values()) == {True}


def test_what_is_missing_is_named(driver, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.partition(".")[0] in ("cupy", "triton"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(_nvrtc, "_open", lambda: (_ for _ in ()).throw(ImportError("no libnvrtc.so")))
    found = eqxc.available_backends()
    assert found["triton"] == "triton cannot be imported (No module named 'triton'). Install eqxcallback[triton]."
    assert str(found["cupy"]).endswith("Install eqxcallback[cuda13].")
    assert "there is no NVRTC" in str(found["cuda"])
    assert "nvidia-cuda-nvrtc" in str(found["cuda"])


def test_a_gpu_that_is_not_there(driver):
    driver.fail("cuDeviceGetCount", 100)
    assert "cuDeviceGetCount failed" in str(eqxc.available_backends()["cuda"])
