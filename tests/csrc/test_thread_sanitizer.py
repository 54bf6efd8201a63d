"""The extension under ThreadSanitizer, and what threads share, alone, under all sanitizers."""

import os
import subprocess

import jax
import pytest

from .sanitized import ROOT, build, run


pytestmark = pytest.mark.sanitizers


def test_threads(tmp_path):
    package = build("thread", tmp_path)
    # JAX and CPython are not built for it: what they do between our lines cannot be judged.
    options = {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1"}
    output = run(
        package,
        ["libtsan.so"],
        options,
        "tests/callback/test_threads.py",
        "tests/callback/test_handles.py",
        "-k",
        "not leak",
    )
    assert "passed" in output


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_kernels_on_a_pool_of_late_threads(sanitizers, tmp_path):
    """XLA's own pool is not built for a sanitizer: what passes between its threads cannot be judged. This one is."""
    # How kernels share work is the same for each instruction set, and compiling them takes a minute: here is only one.
    common = ["g++", "-std=c++17", "-O0", "-g", f"-fsanitize={sanitizers}", '-DEQXCALLBACK_VERSION="of a test"']
    includes = ["-I", str(ROOT / "csrc"), "-isystem", jax.ffi.include_dir()]
    sources = [
        "csrc/ffi/thread_pool.cc",
        "csrc/cpu/isa.cc",
        "csrc/cpu/isa_portable.cc",
        "csrc/cpu/measured.cc",
        "tests/csrc/thread_pool_test.cc",
    ]
    objects = [str(tmp_path / f"{i}.o") for i in range(len(sources))]
    for source, target in zip(sources, objects, strict=True):
        # The addresses of kernels have a test of their own: here they take minutes to compile.
        plain = ["-fno-sanitize=all"] if sanitizers != "thread" and source.endswith("isa_portable.cc") else []
        command = [*common, *plain, *includes, "-DEQXCALLBACK_PORTABLE", "-c", str(ROOT / source), "-o", target]
        subprocess.run(command, check=True)
    program = str(tmp_path / "thread_pool_test")
    subprocess.run([*common, *objects, "-o", program, "-lpthread"], check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "ok\n", "")


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_launches_from_many_threads(sanitizers, tmp_path):
    common = ["g++", "-std=c++17", "-O1", "-g", f"-fsanitize={sanitizers}"]
    driver, program = str(tmp_path / "libdriver.so"), str(tmp_path / "gpu_launch_test")
    fake = str(ROOT / "tests/software_gpu/driver.cc")
    subprocess.run([*common, "-shared", "-fPIC", fake, "-o", driver, "-ldl"], check=True)
    sources = [ROOT / "tests/csrc/gpu_launch_test.cc", *(ROOT / "csrc/gpu").glob("*.cc")]
    includes = ["-I", str(ROOT / "csrc")]
    subprocess.run([*common, *includes, *map(str, sources), "-o", program, "-ldl", "-lpthread"], check=True)
    # The fake driver lets go of what the real one would keep: its functions.
    result = subprocess.run(
        [program, driver], capture_output=True, text=True, env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "ok\n", "")
