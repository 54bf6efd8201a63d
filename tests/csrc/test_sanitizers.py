"""The extension under sanitizers: it is built with them, and the callback's tests run again on that build."""

import os
import pathlib
import subprocess
import sys
import zipfile

import jax
import pytest


ROOT = pathlib.Path(__file__).parents[2]


def library(name):
    path = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not pathlib.Path(path).is_absolute():
        pytest.skip(f"this g++ has no {name}")
    return path


def build(sanitizers, folder):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", str(ROOT), "-w", str(folder)]
    settings = {"cmake.define.EQXCALLBACK_SANITIZE": sanitizers, "build-dir": str(folder / "build")}
    command += [f"--config-settings={key}={value}" for key, value in settings.items()]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "package")
    return folder / "package"


def run(package, libraries, options, *arguments):
    """The output of pytest on the sanitized package; both have to be clean."""
    preload = " ".join(library(name) for name in (*libraries, "libstdc++.so.6"))
    environment = {**os.environ, "LD_PRELOAD": preload, **options}
    script = str(pathlib.Path(__file__).with_name("run_sanitized.py"))
    command = [sys.executable, script, str(package), "-q", "-p", "no:cacheprovider", *arguments]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "Sanitizer" not in output, output
    assert "runtime error" not in output, output
    return output


@pytest.fixture(scope="module")
def address_package(tmp_path_factory):
    return build("address,undefined", tmp_path_factory.mktemp("address"))


def run_with_addresses(package, *arguments):
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}  # CPython itself leaks at exit
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
    # The quarantine of freed memory looks like a leak.
    assert "passed" in run_with_addresses(address_package, "tests/callback", "-k", "not leak")


@pytest.mark.parametrize("parts", [("kernels",), ("edges", "handlers", "special_values")], ids="-".join)
def test_addresses_in_kernels(parts, address_package):
    assert "passed" in run_with_addresses(address_package, *(f"tests/ops/test_{part}.py" for part in parts))


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
def test_kernels_on_a_pool_of_late_threads(sanitizers, tmp_path, isa_flags):
    """XLA's own pool is not built for a sanitizer: what passes between its threads cannot be judged. This one is."""
    common = ["g++", "-std=c++17", "-O1", "-g", f"-fsanitize={sanitizers}"]
    includes = ["-I", str(ROOT / "csrc"), "-isystem", jax.ffi.include_dir()]
    objects = []
    for isa, own in isa_flags.items():
        objects.append(str(tmp_path / f"{isa}.o"))
        source = str(ROOT / "csrc" / "cpu" / f"isa_{isa}.cc")
        subprocess.run([*common, *includes, *own, "-c", source, "-o", objects[-1]], check=True)
    sources = [ROOT / "tests/csrc/thread_pool_test.cc", ROOT / "csrc/ffi/thread_pool.cc", ROOT / "csrc/cpu/isa.cc"]
    program = str(tmp_path / "thread_pool_test")
    subprocess.run([*common, *includes, *map(str, sources), *objects, "-o", program, "-lpthread"], check=True)
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


def test_addresses_in_launches(address_package):
    arguments = ["tests/gpu_launch/test_launcher.py", "-k", "not memory"]
    assert "passed" in run_with_addresses(address_package, *arguments)
