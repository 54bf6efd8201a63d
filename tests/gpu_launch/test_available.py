"""The answer of `available_backends` for each kind of kernel, and why it is not there."""

import builtins
import importlib
import importlib.util

import pytest

import eqxcallback as eqxc
from eqxcallback.backends import _nvrtc, _tvm_ffi


@pytest.fixture(autouse=True)
def _finds_anew():
    _nvrtc.find.cache_clear()
    yield
    _nvrtc.find.cache_clear()


def test_what_needs_no_gpu_is_there():
    backends = eqxc.available_backends()
    kinds = ["python", "jax", "native", "c", "numba", "tvm_ffi", "cuda", "image", "triton", "cupy", "emulation"]
    assert list(backends) == kinds
    assert backends["python"] is True
    assert backends["native"] is True
    assert backends["c"] is True


def test_without_a_driver(driver):
    driver.remove()
    backends = eqxc.available_backends()
    assert "there is no CUDA driver: /nowhere.so" in str(backends["cuda"])


def test_with_a_driver(driver, monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    monkeypatch.setattr(_nvrtc, "find", lambda: None)
    monkeypatch.setattr(_tvm_ffi, "need_tvm_ffi", lambda: None)
    assert set(eqxc.available_backends().values()) == {True}


def test_what_is_missing_is_named(driver, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.partition(".")[0] in ("cupy", "triton"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(_nvrtc, "_open", lambda: (_ for _ in ()).throw(ImportError("no libnvrtc.so")))
    backends = eqxc.available_backends()
    assert backends["triton"] == "triton cannot be imported (No module named 'triton'). Install eqxcallback[triton]."
    assert str(backends["cupy"]).endswith("Install eqxcallback[cuda13].")
    assert "there is no NVRTC" in str(backends["cuda"])
    assert "nvidia-cuda-nvrtc" in str(backends["cuda"])


def test_a_gpu_that_is_not_there(driver):
    driver.fail("cuDeviceGetCount", 100)
    assert "cuDeviceGetCount failed" in str(eqxc.available_backends()["cuda"])


def test_a_compiler_that_compiles_nothing_is_none(monkeypatch):
    """CuPy's says its version, also where it does not find its own builtins."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")

    def compile(*_):
        raise _nvrtc.CompileError("nvrtc: error: failed to open libnvrtc-builtins.so.13.0")

    monkeypatch.setattr(_nvrtc._CuPy, "compile", compile)
    assert isinstance(_nvrtc.find(), _nvrtc._Library)
    monkeypatch.setattr(_nvrtc._Library, "compile", compile)
    _nvrtc.find.cache_clear()
    with pytest.raises(ImportError, match=r"there is no NVRTC.*CuPy: nvrtc: error: failed to open libnvrtc-builtins"):
        _nvrtc.find()


def test_headers_of_a_wheel_and_of_a_toolkit(monkeypatch, tmp_path):
    """The wheel's headers are first. What it lacks is in the toolkit, if that is of the same major version."""

    def folder(name, version=None):
        path = tmp_path / name
        path.mkdir(parents=True)
        (path / "cuda_fp16.h").touch()
        if version is not None:
            (path / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
        return path

    wheel, older, same = folder("cu13/include"), folder("old", 12090), folder("new", 13000)
    (same / "cccl").mkdir()
    monkeypatch.setattr(_nvrtc, "_folders", lambda kind: iter([wheel]))
    monkeypatch.setattr(_nvrtc, "_system_folders", lambda: iter([older, same, same, tmp_path / "none"]))
    assert _nvrtc.include_options(13) == [f"--include-path={path}" for path in (wheel, same, same / "cccl")]
    assert _nvrtc.include_options(12) == [f"--include-path={older}"]


def test_headers_of_cuda_12_are_in_a_folder_for_each_wheel(monkeypatch, tmp_path):
    names = ("cuda_nvrtc", "cuda_runtime", "cuda_nvcc", "cuda_cccl")
    folders = [tmp_path / name / "include" for name in names]
    for folder in (*folders, tmp_path / "cu13" / "include"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(_nvrtc, "_roots", lambda: [tmp_path])
    monkeypatch.setattr(_nvrtc, "_system_folders", lambda: iter(()))
    assert _nvrtc.include_options(12) == [f"--include-path={folder}" for folder in folders]
    assert _nvrtc.include_options(13) == [f"--include-path={tmp_path / 'cu13' / 'include'}"]
