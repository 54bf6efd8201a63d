"""Scripts of this checkout: what they write and remove, and what they say."""

import importlib.machinery
import importlib.util
import io
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

import pytest


pytestmark = pytest.mark.any_jax_version

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def check_wheels():
    loader = importlib.machinery.SourceFileLoader("check_wheels", str(ROOT / "scripts" / "check_wheels"))
    spec = importlib.util.spec_from_loader("check_wheels", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def nothing_is_built(check_wheels, monkeypatch):
    """Files of the right names are all that building leaves."""

    def run(*command, **_):
        words = [str(word) for word in command]
        if "--sdist" in words:
            folder = pathlib.Path(words[words.index("--outdir") + 1])
            folder.mkdir(parents=True, exist_ok=True)
            with tarfile.open(folder / "eqxcallback-2.tar.gz", "w:gz") as archive:
                archive.addfile(tarfile.TarInfo("eqxcallback-2/PKG-INFO"), io.BytesIO())
        elif "wheel" in words:
            folder = pathlib.Path(words[words.index("-w") + 1])
            folder.mkdir()
            (folder / f"eqxcallback-2-{folder.name}-any.whl").touch()
        elif "auditwheel" in words:
            folder, wheel = pathlib.Path(words[words.index("--wheel-dir") + 1]), pathlib.Path(words[-1])
            shutil.copy(wheel, folder / wheel.name.replace("any", "manylinux_2_28_any"))
        return ""

    monkeypatch.setattr(check_wheels, "run", run)
    for name in ("check_cibuildwheel", "check_sdist", "check_wheel"):
        monkeypatch.setattr(check_wheels, name, lambda *_: None)
    tried = []
    monkeypatch.setattr(check_wheels, "try_wheel", lambda wheel, python: tried.append((wheel, python, wheel.exists())))
    return tried


def test_wheels_go_where_other_files_are(check_wheels, nothing_is_built, tmp_path, monkeypatch):
    """`--out` may be a home: only what an earlier build left makes way."""
    (tmp_path / "letters").mkdir()
    for name in ("letters/mother", "notes.txt", "other-1.tar.gz", "eqxcallback-1.tar.gz", "eqxcallback-1-any.whl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "argv", ["check_wheels", "--out", str(tmp_path)])
    assert check_wheels.main() == 0
    platform = "manylinux_2_28_any" if sys.platform == "linux" else "any"
    wheels = [f"eqxcallback-2-{tag}-{platform}.whl" for tag in ("cp311-cp311", "cp312-abi3")]
    kept = {"letters", "letters/mother", "notes.txt", "other-1.tar.gz"}
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {*kept, *wheels, "eqxcallback-2.tar.gz"}
    assert nothing_is_built == [(tmp_path / wheels[0], "3.11", True), (tmp_path / wheels[1], "3.13", True)]


def test_a_warning_is_not_what_a_command_prints(check_wheels):
    code = "import sys; print('a warning', file=sys.stderr); print(1.5); sys.exit(int(sys.argv[1]))"
    assert check_wheels.run(sys.executable, "-c", code, 0) == "1.5\n"
    with pytest.raises(check_wheels.Wrong, match=r"failed with 3:\n1.5\na warning\n"):
        check_wheels.run(sys.executable, "-c", code, 3)


def test_jaxs_tests_install_nothing(tmp_path):
    """A Python without absl-py."""
    tests, python = tmp_path / "buffer_callback_test.py", tmp_path / "venv" / "bin" / "python"
    tests.write_text("from jax.experimental import buffer_callback\n")
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ "$1" != -c ]\n')
    python.chmod(0o755)
    environment = {**os.environ, "VENV": os.path.relpath(tmp_path / "venv", ROOT)}
    command = [str(ROOT / "scripts" / "run_jax_tests"), str(tests)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "absl-py is not installed" in done.stderr
    assert (tmp_path / "asked").read_text() == "-c import absl\n"


def test_make_clean_removes_what_make_made():
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    said = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"build", "site", ".venv*"} <= set(said.split())
