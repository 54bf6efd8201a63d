"""The extension under AddressSanitizer and UndefinedBehaviorSanitizer: tests of what it does run again on that build.

The other sanitizer has a file of its own: files of tests run side by side.
"""

import subprocess
import sys

import pytest

from .sanitized import build, run


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
    checked = [f"tests/debug/test_{part}.py" for part in ("checked", "guards", "inline", "strict")]
    # The quarantine of freed memory looks like a leak.
    assert "passed" in run_with_addresses(address_package, "tests/callback", *checked, "-k", "not leak")


@pytest.mark.parametrize(
    "parts", [("kernels", "backward"), ("edges", "handlers", "layer_kernels", "special_values")], ids="-".join
)
def test_addresses_in_kernels(parts, address_package):
    assert "passed" in run_with_addresses(address_package, *(f"tests/ops/test_{part}.py" for part in parts))


def test_addresses_in_launches(address_package):
    arguments = ["tests/gpu_launch/test_launcher.py", "-k", "not memory"]
    assert "passed" in run_with_addresses(address_package, *arguments)
