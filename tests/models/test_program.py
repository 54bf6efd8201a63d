"""Manners that all programs of `models/` share."""

import time

import pytest

from models import _program


pytestmark = pytest.mark.any_jax_version


def test_a_bar_for_what_takes_more_than_a_second(capsys):
    for seconds in (0.6, 0.0):
        for _ in _program.progress((time.sleep(seconds) for _ in range(3)), desc="sleeping", unit="nap", total=3):
            pass
        captured = capsys.readouterr()
        assert ("sleeping" in captured.err) == (seconds > 0)
        assert captured.out == ""


def test_without_stderr(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    assert list(_program.progress(range(3), desc="counting", unit="number")) == [0, 1, 2]
    _program.report("nobody hears this")
