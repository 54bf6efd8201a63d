"""Manners that all programs of `models/` share."""

import contextlib
import re
import threading
import time

import jax.numpy as jnp
import pytest
from tqdm import tqdm

from models import _program, embed
from models.finetune import __main__ as finetune
from models.generate import __main__ as generate
from models.serve import __main__ as serve
from models.train import __main__ as train


pytestmark = pytest.mark.any_jax_version


def test_a_bar_for_what_takes_more_than_a_second(capsys):
    for seconds in (0.6, 0.0):
        for _ in _program.progress((time.sleep(seconds) for _ in range(3)), desc="sleeping", unit="nap", total=3):
            pass
        captured = capsys.readouterr()
        assert ("sleeping" in captured.err) == (seconds > 0)
        assert captured.out == ""


def test_a_bar_in_the_midst_of_an_item(capsys):
    """An item that takes more than a second does not wait for its end, which clears the bar."""
    for _ in _program.progress(range(2), desc="sleeping", unit="nap"):
        time.sleep(1.2)
        assert "sleeping:   0%" in capsys.readouterr().err
        break
    assert capsys.readouterr().err.endswith("\r")
    assert not timers()
    with contextlib.suppress(ZeroDivisionError):
        for _ in _program.progress(range(2), desc="dividing", unit="quotient"):
            assert timers()
            raise ZeroDivisionError
    assert not timers()
    assert list(_program.progress(iter("abc"), desc="counting", unit="letter", initial=4)) == ["a", "b", "c"]
    assert not timers()
    assert "dividing" not in capsys.readouterr().err


def timers():
    return [thread for thread in threading.enumerate() if "_draw_until" in thread.name]


def test_results_bring_no_bar_before_its_time(capsys):
    for _ in _program.progress(range(2), desc="writing", unit="line"):
        _program.write(["a result\n"])
    written = capsys.readouterr()
    assert written.out == "a result\n" * 2
    assert "writing" not in written.err


def test_a_bar_that_nobody_reads(monkeypatch):
    """The thread that draws it ends, and says nothing."""

    def broken(text):
        raise BrokenPipeError

    bar = _program.progress(range(1), desc="sleeping", unit="nap")
    assert isinstance(bar, tqdm)
    items = iter(bar)
    next(items)
    monkeypatch.setattr(bar, "sp", broken)
    time.sleep(1.2)
    assert not timers()
    with pytest.raises(BrokenPipeError):
        next(items)  # the program's own thread draws it


def test_errors_of_files_are_no_errors_of_results(capsys):
    def program(arguments):
        raise PermissionError(13, "Permission denied", "/a/file")

    assert _program.run("demo", program, []) == 2
    message = "demo: error: a file cannot be read or written: [Errno 13] Permission denied: '/a/file'\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "expected enough memory; got MemoryError."),
        (MemoryError("Unable to allocate 9. TiB"), "expected enough memory; got Unable to allocate 9. TiB."),
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.\nat: here"),
            "expected enough memory; got RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.",
        ),
    ],
)
def test_too_little_memory_is_one_line(error, message, capsys):
    def program(arguments):
        raise error

    assert _program.run("demo", program, [], remedy="Lower --size.") == 2
    assert capsys.readouterr().err == f"demo: error: {message} Lower --size.\n"


def test_the_error_of_jax_is_one_of_memory(capsys):
    """More than any processor has addresses for."""
    assert _program.run("demo", lambda _: print(jnp.zeros(2**50, jnp.int8)), []) == 2
    message = r"demo: error: expected enough memory; got RESOURCE_EXHAUSTED: .*\. Use a machine with more\.\n"
    assert re.fullmatch(message, capsys.readouterr().err)


def test_other_errors_are_mistakes_of_ours():
    def program(arguments):
        raise RuntimeError("INTERNAL: a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        _program.run("demo", program, [])


@pytest.mark.parametrize(
    ("program", "name", "command"),
    [
        (embed, "embed", []),
        (finetune, "finetune", []),
        (generate, "generate", []),
        (serve, "serve", []),
        (train, "train", ["gpt"]),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_helps_are_options_of_the_program(program, name, command, capsys, monkeypatch):
    def full(_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(program, f"_{name}", full)
        assert program.main([]) == 2
    line = capsys.readouterr().err
    assert re.fullmatch(rf"{name}: error: expected enough memory; got MemoryError\. (Lower|Begin|Pass) .*\.\n", line)
    with pytest.raises(SystemExit):
        program.main([*command, "--help"])
    usage = capsys.readouterr().out
    options = re.findall("--[a-z-]+", line)
    assert all(f"{option} " in usage for option in options)
    assert options or name == "embed"


def test_without_stderr(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    assert list(_program.progress(range(3), desc="counting", unit="number")) == [0, 1, 2]
    _program.report("nobody hears this")
