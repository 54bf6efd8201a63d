"""The benchmark of servers runs once, with a tiny model. No time is asserted."""

import importlib.util
import json
import os
import sys

import pytest

from benchmarks import _report, _servers, serve

from . import one_device
from .models.tiny import write_tiny


pytestmark = pytest.mark.any_jax_version


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", one_device.environment()["XLA_FLAGS"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_what_is_written(tmp_path, capsys):
    write_tiny(tmp_path / "tiny.gguf", {"token_embd": "Q8_0"}, context=512, speaks=True)
    serve.main(["--tiny", "--rounds", "2", "--weights", str(tmp_path / "tiny.gguf"), "--out", str(tmp_path)])
    data = json.loads((tmp_path / "serve.json").read_text())
    text = (tmp_path / "serve.md").read_text().strip()
    assert text == capsys.readouterr().out.strip() == serve.markdown(data)
    assert (data["tokens"], data["rounds"], list(data["clients"])) == (4, 2, ["1", "2"])
    names = ["eqxcallback"]
    if importlib.util.find_spec("llama_cpp") is None:
        assert "\n\nllama-cpp-python was not measured: " in text
        assert "No module named" in data["missing"]["llama-cpp-python"]
    else:
        names.append("llama-cpp-python")
    for row in data["clients"].values():
        assert list(row) == names
        for columns in row.values():
            assert len(columns) == 2
            assert all(0 < low <= median <= high for low, median, high in columns.values())


def test_the_page_shows_the_results_that_are_kept():
    data = json.loads((_report.RESULTS / "serve.json").read_text())
    assert list(data["clients"]) == ["1", "4", "8"]
    assert not data["missing"]
    assert f"<!-- serve -->\n{serve.markdown(data)}\n<!-- /serve -->" in serve.PAGE.read_text()


def test_a_server_that_does_not_start():
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(_servers.DidNotStart, match="no such model"),
        _servers.serving(command, _servers.free_port(), os.sched_getaffinity(0)),
    ):
        pass


def test_wrong_options(capsys):
    for arguments, message in (
        (["--readme", "--tiny"], "--readme needs a full run, of the default model"),
        (["--rounds", "0"], "expected --rounds of 1 or more; got 0"),
    ):
        with pytest.raises(SystemExit):
            serve.main(arguments)
        assert message in capsys.readouterr().err


def test_a_server_that_refuses():
    """A server that answers with an error, to two clients, is an error, and nobody hangs."""
    code = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, status, content):
        self.send_response(status); self.end_headers(); self.wfile.write(content)
    do_GET = lambda self: self.reply(200, b'{"data": [{"id": "m"}]}')
    do_POST = lambda self: self.reply(503, b"full")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
    port = _servers.free_port()
    with _servers.serving([sys.executable, "-c", code, str(port)], port, os.sched_getaffinity(0)) as server:
        assert server == (port, "m")
        with pytest.raises(RuntimeError, match=rf"port {port}, m: expected an answer; got status 503: b'full'"):
            _servers.ask_together(server, ["a", "b"], 4)
