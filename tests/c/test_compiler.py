"""The machine's own compiler, where it is not as expected."""

import ctypes
import dataclasses
import os
import subprocess
import sys
import types

import jax.numpy as jnp
import pytest

from eqxcallback import CKernel
from eqxcallback.backends import _c, _host_compiler

from ..endless_compiler import check_killed, endless_compiler
from .test_source import PARAMETERS, TIMES, op_of


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("exit 0", r"expected the compiler to write a library; .*/compiler .* code 0 and without a message. Correct"),
        ("echo not me >&2", r"ended with the code 0 and wrote none: not me. Correct options, or name another compiler"),
        ("exit 3", r"ended with the code 3 and without a message"),
        ("kill -9 $$", r"ended with the code -9 and without a message"),
    ],
)
def test_a_compiler_that_writes_nothing(does, error, tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\ncat >/dev/null\n{does}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(ValueError, match=rf"times\[c\]: .*{error}"):
        op_of(CKernel("times", source=TIMES, parameters=PARAMETERS))(jnp.ones(2), a=1.0)


def test_a_compiler_whose_name_has_an_open_quote(monkeypatch):
    monkeypatch.setenv("CC", "gcc '")
    with pytest.raises(
        ValueError, match=r"times\[c\]: the environment variable CC cannot be .* \(No closing quotation"
    ):
        op_of(CKernel("times", source=TIMES, parameters=PARAMETERS))(jnp.ones(2), a=1.0)


def test_a_compiler_that_waits_for_input(tmp_path):
    """As one by way of ssh does when it is asked for its version. Input that never ends is not passed on to it."""
    compiler = tmp_path / "compiler"
    waits = f"timeout 2 cat >/dev/null || touch {tmp_path}/waited"
    compiler.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then {waits}; else exec gcc "$@"; fi\n')
    compiler.chmod(0o755)
    code = f"""
import eqxcallback as eqxc, jax.numpy as jnp
kernel = eqxc.CKernel("times", source={TIMES!r}, parameters={PARAMETERS!r}, options="-lm")
op = eqxc.Op("times", kernels={{"cpu": kernel}}, reference=lambda x, *, a: a * jnp.abs(x))
print(op(jnp.ones(2), a=3.0).tolist())
"""
    environment = {**os.environ, "CC": str(compiler)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"[3.0, 3.0]\n"
    assert not (tmp_path / "waited").exists()


@pytest.mark.parametrize("asked", ["--version", "-x"])
def test_a_compiler_that_never_ends(asked, tmp_path, monkeypatch):
    """It is killed, and so is what it has started, which holds the pipes that its messages go through."""
    compiler = tmp_path / "compiler"
    child = endless_compiler(compiler, asked, "gcc", monkeypatch)
    monkeypatch.setenv("CC", str(compiler))
    error = (
        rf"times\[c\]: expected the compiler to end within 3 seconds; .*/compiler {asked}.* did not\. Run it by hand"
    )
    with pytest.raises(ValueError, match=error):
        op_of(CKernel("times", source=TIMES, parameters=PARAMETERS))(jnp.ones(2), a=1.0)
    check_killed(child)
    assert not list(tmp_path.glob("cache/**/*"))


def test_nothing_is_looked_at_twice(tmp_path, monkeypatch):
    """A library is loaded once to see whether it can be, and looked up once for each lowering; a compiler is asked once."""
    log, compiler, seen = tmp_path / "log", tmp_path / "compiler", []
    compiler.write_text(f'#!/bin/sh\necho "$1" >>{log}\nexec gcc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    prepare, built = _c.prepare, _c.built
    monkeypatch.setattr(_c, "prepare", lambda *args: (seen.append("prepare"), prepare(*args))[1])
    monkeypatch.setattr(_c, "built", lambda *args, **options: (seen.append("built"), built(*args, **options))[1])
    load = lambda path: (seen.append("load"), ctypes.CDLL(path))[1]
    monkeypatch.setattr(_host_compiler, "ctypes", types.SimpleNamespace(CDLL=load))
    kernel = CKernel("times", source=TIMES, parameters=PARAMETERS)
    for op in (op_of(kernel), dataclasses.replace(op_of(kernel), name="again")):
        for size in (1, 2, 3):
            assert op(jnp.ones(size), a=3.0).tolist() == [3.0] * size
    assert log.read_text().split() == ["--version", "-x"]
    assert seen.count("load") == 1
    assert seen.count("built") == seen.count("prepare") > 0


def test_a_source_with_the_character_nul(tmp_path):
    """Compilers of CUDA C++ would take what is before it."""
    file = tmp_path / "times.c"
    file.write_text(TIMES + "\0")
    for source, name in ((TIMES + "\0", "source"), (file, "times.c")):
        with pytest.raises(ValueError, match=rf"times\[c\]: expected the source {name}.* to be a text; got .* NUL"):
            op_of(CKernel("times", source=source, parameters=PARAMETERS))(jnp.ones(2), a=1.0)
