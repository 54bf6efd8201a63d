"""`python -m eqxcallback new-kernel`: each kind of package is written, installed, and passes its own tests."""

import inspect
import pathlib
import runpy
import subprocess
import sys

import jax
import pytest

from eqxcallback.program import main
from eqxcallback.program._new_kernel import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_package(kind, tmp_path, monkeypatch, capsys):
    name = f"soft_gate_{kind}"
    package, site = tmp_path / "package", tmp_path / "site"
    assert main(["new-kernel", name, "--kind", kind, "--out", str(package)]) == 0
    files = [line for line in capsys.readouterr().out.splitlines() if line.startswith(str(package))]
    assert sorted(files) == sorted(str(path) for path in package.rglob("*") if path.is_file())
    for path in files:
        text = pathlib.Path(path).read_text()
        assert "my_kernel" not in text
        assert "MyKernel" not in text
    assert KINDS[kind].source in {path.name for path in (package / "src" / name).iterdir()}

    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=E4,E7,E9,F,I"]
    subprocess.run(ruff, cwd=package, check=True)
    # What the package needs to be built is installed.
    alone = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *alone, "--target", site, package], check=True)

    monkeypatch.syspath_prepend(site)
    tests = runpy.run_path(str(package / "tests" / f"test_{name}.py"))
    assert str(sys.modules[name].__file__).startswith(str(site))
    functions = {key: value for key, value in tests.items() if key.startswith("test_") and inspect.isfunction(value)}
    assert len(functions) == 3
    for function in functions.values():
        function()

    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--rows", "3", "--features", "5", "--repeats", "2"])
    runpy.run_path(str(package / "benchmark.py"), run_name="__main__")
    out = capsys.readouterr().out
    if KINDS[kind].platform == jax.default_backend():
        assert [line.split()[:2] for line in out.splitlines()[1:]] == [["3", "kernel"], ["3", "reference"]]
    else:
        assert f"On this platform, {jax.default_backend()}, the reference runs in place of the kernel" in out
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


@pytest.mark.any_jax_version
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("9lives", "expected a name for a Python module, such as my_kernel, in lower case; got '9lives'"),
        ("soft-gate", "got 'soft-gate'"),
        ("SoftGate", "in lower case; got 'SoftGate'"),
        ("soft__gate", "got 'soft__gate'"),
        ("../gate", "got '../gate'"),
        ("class", "got 'class'"),
        ("none", "got 'none'"),  # its class would be None
        ("numpy", "expected a name that no installed module has; got 'numpy'"),
    ],
)
def test_a_wrong_name(name, said, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["new-kernel", name, "--kind", "numpy", "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.any_jax_version
def test_a_folder_that_exists(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "soft_gate").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(["new-kernel", "soft_gate", "--kind", "c"])
    assert "soft_gate exists. Choose another with --out" in capsys.readouterr().err
    assert main(["new-kernel", "soft_gate", "--kind", "c", "--out", "other"]) == 0
    assert (tmp_path / "other" / "src" / "soft_gate" / "kernel.c").exists()


@pytest.mark.any_jax_version
@pytest.mark.parametrize("arguments", [[], ["--kind", "fortran"]], ids=str)
def test_a_wrong_kind(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["new-kernel", "soft_gate", *arguments])
    assert "--kind" in capsys.readouterr().err
