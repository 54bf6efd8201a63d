"""The extension under AddressSanitizer and UndefinedBehaviorSanitizer: tests of what it does run again on that build.

The other sanitizer has a file of its own: files of tests run side by side.
"""

import os
import subprocess
import sys

import pytest

from eqxcallback import _ext

from .kernel_output import assert_same, kernel_output
from .sanitized import ROOT, build, run


pytestmark = pytest.mark.sanitizers


@pytest.fixture(scope="module")
def address_package(tmp_path_factory):
    return build("address,undefined", tmp_path_factory.mktemp("address"))


def run_with_addresses(package, *arguments):
    # CPython itself leaks at exit. Stacks of all that XLA allocates would take longer than compiling.
    options = {"ASAN_OPTIONS": "detect_leaks=0:malloc_context_size=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return run(package, ["libasan.so", "libubsan.so"], options, *arguments)


def test_the_build_is_sanitized(address_package):
    probe = subprocess.run(
        [
            sys.executable,
            "-c",
            "import ctypes, sys, glob; ctypes.CDLL(glob.glob(sys.argv[1])[0])",
            f"{address_package}/eqxcallback/_ext*.so",
        ],
        capture_output=True,
        text=True,
    )
    assert "ASan runtime does not come first" in probe.stderr


def test_addresses_in_callbacks(address_package):
    checked = [f"tests/debug/test_{part}.py" for part in ("checked", "guards", "inline", "strict", "user_kernels")]
    # The quarantine of freed memory looks like a leak.
    assert "passed" in run_with_addresses(address_package, "tests/callback", *checked, "-k", "not leak")


def test_addresses_in_handlers(address_package):
    assert "passed" in run_with_addresses(address_package, "tests/ops/test_handlers.py")


def test_addresses_in_kernels(address_package, tmp_path):
    """All instruction sets compute the same. Without Python: its memory is not what a kernel is given here."""
    program = str(tmp_path / "every_kernel")
    objects = [str(path) for path in (address_package.parent / "build").rglob("kernels.dir/*.o")]
    command = ["g++", "-std=c++17", "-O0", "-g", "-fsanitize=address,undefined", "-I", str(ROOT / "csrc")]
    command += [str(ROOT / "tests/csrc/every_kernel.cc"), *objects, "-o", program]
    subprocess.run(command, check=True)
    options = {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    outputs = kernel_output(program, env={**os.environ, **options})
    assert list(outputs) == _ext.available_isas()
    for results in outputs.values():
        assert_same(results, outputs["portable"])


def test_addresses_in_launches(address_package):
    arguments = ["tests/gpu_launch/test_launcher.py", "-k", "not memory"]
    assert "passed" in run_with_addresses(address_package, *arguments)
