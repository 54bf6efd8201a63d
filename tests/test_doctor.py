"""`python -m eqxcallback doctor`, which the reports of bugs begin with."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

import eqxcallback as eqxc
from eqxcallback import _ext
from eqxcallback.program import _doctor as program, main


def test_the_program():
    done = subprocess.run(
        [sys.executable, "-m", "eqxcallback", "doctor"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"eqxcallback {eqxc.__version__}" in done.stdout
    assert f"jax           {jax.__version__}\n" in done.stdout
    assert done.stdout.count(": passed\n") == len(program.CHECKS)


def test_backends(monkeypatch, capsys):
    # In this process: other tests may have loaded drivers into it that a fresh one would not find.
    monkeypatch.setattr(program, "CHECKS", {})
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name, state in eqxc.available_backends().items():
        assert f"  {name:<14}{'yes' if state is True else f'no: {state}'}\n" in out


@pytest.mark.parametrize("faster", [{}, {"attention": "avx512", "linear": "avx512_bf16"}])
@pytest.mark.parametrize("is_written", [True, False])
def test_which_kernels_multiply_bf16(faster, is_written, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(program, "CHECKS", {})
    monkeypatch.setattr(_ext, "isas_of_bf16", lambda: faster)
    file = tmp_path / "bf16"
    monkeypatch.setattr(_ext, "file_of_bf16", lambda: str(file))
    if is_written:
        file.touch()
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert ("products of bf16, as measured: attention on avx512, linear on avx512_bf16\n" in out) == bool(faster)
    assert (f"  remembered in {file}; without it they are measured again\n" in out) == (bool(faster) and is_written)
    assert ("  measured in each process" in out) == (bool(faster) and not is_written)


def test_a_wrong_instruction_set_does_not_end_it():
    done = subprocess.run(
        [sys.executable, "-m", "eqxcallback", "doctor"],
        env={**os.environ, "EQXCALLBACK_ISA": "AVX2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "kernels for CPUs: none run. eqxcallback: expected EQXCALLBACK_ISA to be one of " in done.stdout
    assert "a layer with a kernel in Python: passed\n" in done.stdout
    assert done.stderr.count("Traceback") == 0


def test_a_check_that_fails(monkeypatch, capsys):
    def fails():
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(program.CHECKS, next(iter(program.CHECKS)), fails)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "RuntimeError: no such kernel" in out
    assert (out.count(": FAILED\n"), out.count(": passed\n")) == (1, len(program.CHECKS) - 1)


@pytest.mark.parametrize("arguments", [[], ["nurse"]], ids=str)
def test_a_wrong_command(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "doctor" in capsys.readouterr().err


def test_sources_that_are_not_built(tmp_path):
    """In a checkout Python finds them before the package that is installed."""
    package = pathlib.Path(eqxc.__file__).parent
    shutil.copytree(package, tmp_path / "eqxcallback", ignore=shutil.ignore_patterns("_ext*.so", "__pycache__"))
    # -S: without what an editable install hooks into imports.
    command = [sys.executable, "-S", "-m", "eqxcallback", "doctor"]
    installed = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": installed}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"got the sources in {tmp_path}, which are not built" in done.stderr.splitlines()[-1]
