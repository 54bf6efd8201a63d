"""Strict promotion everywhere: a kernel gets the dtypes and ranks that it was given, or an error."""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile
from typing import Any


# Read by XLA when the first test imports JAX: several devices, so that sharded programs run on any machine. Compiling takes most
# of the time of all tests, and on the oldest JAX half of it can be had back; newer ones are tested as users run them.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
        " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    )
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# Without a GPU, JAX's CUDA plugin compiles for one that is described, and must not look for the libraries of a real one.
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.append(os.path.join(sys.prefix, "deviceless"))  # where `make test` installs it

import jax
import jaxtyping
import pytest

from eqxcallback import _ext

from .parts import (
    pytest_addoption as pytest_addoption,
    pytest_collection_modifyitems as pytest_collection_modifyitems,
    pytest_report_header as pytest_report_header,
)


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# JAX makes a new MLIR context for each program that it lowers: 2 ms and half of the memory of all tests, which one context for
# each file of tests saves. There is no public way to give JAX a context.
IS_OLDEST_JAX = jax.__version__.startswith("0.10.")
if IS_OLDEST_JAX:
    from jax._src.interpreters import mlir

    _mlir_context = functools.cache(mlir.make_ir_context)
    mlir.make_ir_context = _mlir_context

# A program in five is compiled again by another file of tests, or by the other process: they keep those that take longer than to
# load them.
if IS_OLDEST_JAX and jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
    if "EQXCALLBACK_TESTS_PROGRAMS" not in os.environ:  # which workers of pytest inherit
        os.environ["EQXCALLBACK_TESTS_PROGRAMS"] = tempfile.mkdtemp(prefix="eqxcallback-programs-")
        atexit.register(shutil.rmtree, os.environ["EQXCALLBACK_TESTS_PROGRAMS"], ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", os.environ["EQXCALLBACK_TESTS_PROGRAMS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# JAX writes such a file in place. Who reads half of it is told so, and compiles.
_HALF_WRITTEN = "ignore:Error reading persistent compilation cache entry"

# Tracing makes many objects, few of them cycles: Python's collector, which goes through all of them, need not come so often.
gc.set_threshold(20_000, 20, 50)

_raises = pytest.raises


@contextlib.contextmanager
def _unchecked():
    """Nothing is checked against its annotations, under jaxtyping's import hook too."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


class _RaisesUnchecked:
    """A generator would be a cycle with the exception, which keeps what the test made alive."""

    def __init__(self, *args, **kwargs):
        self._expected: Any = _raises(*args, **kwargs)
        self._unchecked = _unchecked()

    def __enter__(self):
        self._unchecked.__enter__()
        return self._expected.__enter__()

    def __exit__(self, *error):
        self._unchecked.__exit__(None, None, None)
        return self._expected.__exit__(*error)


def pytest_configure(config):
    if IS_OLDEST_JAX:
        config.addinivalue_line("filterwarnings", _HALF_WRITTEN)
    # Wrong calls must get our errors, which users see, and under the hook they would get the type checker's.
    if config.getoption("--jaxtyping-packages", None):
        pytest.raises = _RaisesUnchecked


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    random.seed(0)  # beartype checks one item of a sequence, by chance: each run checks the same ones
    with _unchecked() if item.get_closest_marker("wrong_types") else contextlib.nullcontext():
        return (yield)


@pytest.fixture(scope="session")
def isa_flags():
    """The options that the file of each instruction set is compiled with."""
    text = (pathlib.Path(__file__).parents[1] / "csrc/cpu/CMakeLists.txt").read_text()

    def set_to(start):
        match = re.search(rf"set\({start} ([^)]*)\)", text)
        assert match is not None
        return match[1].split()

    avx2, (neon_dot,) = set_to("AVX2"), set_to("NEON_DOT")
    avx512 = [*avx2, *set_to(r"AVX512 \$\{AVX2\}")]
    x86 = {"avx2": avx2, "avx512": avx512, "avx512_bf16": [*avx512, "-mavx512bf16"]}
    x86["avx512_amx"] = x86["avx512_bf16"]
    return x86 | {"neon": [], "neon_dot": [neon_dot], "neon_bf16": [f"{neon_dot}+bf16"], "portable": []}


_folders: list[pathlib.Path] = []  # of the files of tests that this process has begun


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_folder(request):
    """Let go of what a folder of tests has compiled: the programs of all folders take 5 GB of memory in each process. Files of
    one folder compile many small programs alike.
    """
    if _folders and _folders[-1] != request.path.parent:
        jax.clear_caches()
    _folders.append(request.path.parent)
    yield
    if IS_OLDEST_JAX:
        _mlir_context.cache_clear()


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture
def xlas_bf16(monkeypatch):
    """XLA multiplies many rows of bf16, as they are: this machine may do so in f32, or by a kernel."""
    monkeypatch.setattr(_ext, "isa", lambda: "avx512_bf16")
    monkeypatch.setattr(_ext, "isas_of_bf16", dict)
    monkeypatch.setattr(_ext, "vendor", str)


@pytest.fixture(params=_ext.available_isas())
def isa(request):
    """Each instruction set that this machine runs."""
    before = _ext.isa()
    _ext.set_isa(request.param)
    yield request.param
    _ext.set_isa(before)
