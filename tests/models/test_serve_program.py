"""The program: `python -m models.serve`."""

import concurrent.futures
import contextlib
import http.client
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import openai
import pytest

from models.embedder import Embedder
from models.serve.__main__ import _parse, main
from models.serve.server import Server, name_of
from models.tokens.tokenizer import Tokenizer

from .. import one_device
from .test_huggingface import write
from .test_serve import send, serving, until


ROOT = pathlib.Path(__file__).parents[2]
NAME = "SmolLM2-135M-Instruct"
LONG = {"model": NAME, "messages": [{"role": "user", "content": "Count from one to two hundred."}], "temperature": 0}


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_its_streams(number, code):
    command = [
        sys.executable,
        "-m",
        "models.serve",
        "--port",
        "0",
        "--rows",
        "1",
        "--context",
        "512",
        "--no-embeddings",
    ]
    environment = one_device.environment()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = ""
            while "serving" not in line:
                line = process.stderr.readline()
                assert line, process.poll()
            address = re.search(r"serving at (http://127\.0\.0\.1:\d+/v1); Ctrl-C ends it\n", line)
            assert address is not None
            with openai.OpenAI(base_url=address[1], api_key="any", max_retries=0) as client:
                stream = client.chat.completions.create(**LONG, stream=True)
                next(stream)
                process.send_signal(number)
                with pytest.raises(openai.APIError, match="the server is shutting down: the answer has no end"):
                    list(stream)
            assert process.wait(20) == code
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_embeddings_and_bodies_that_are_not_there_at_the_end_are_told(tmp_path, monkeypatch, capfd):
    """At once, not by uvicorn's cancelling them."""
    write(tmp_path)
    server = Server(_parse(["--weights", str(tmp_path), "--rows", "1", "--context", "64"]))
    started, go_on = threading.Event(), threading.Event()

    def embed(self, sentences):
        started.set()
        go_on.wait(20)
        return np.zeros((len(sentences), self.size), np.float32)

    monkeypatch.setattr(Embedder, "embed", embed)
    with socket.create_server(("127.0.0.1", 0)) as bound, concurrent.futures.ThreadPoolExecutor(3) as pool:
        served = pool.submit(server.serve_at, bound)
        try:
            address = f"127.0.0.1:{bound.getsockname()[1]}"
            body = json.dumps({"model": "all-MiniLM-L6-v2", "input": ["a"] * 100})
            asked = [pool.submit(send, f"http://{address}", "POST", "/v1/embeddings", body) for _ in range(2)]
            half = http.client.HTTPConnection(address, timeout=20)
            with contextlib.closing(half):
                half.putrequest("POST", "/v1/completions")
                half.putheader("Content-Length", "100")
                half.endheaders(b"{")
                assert started.wait(20)
                until(lambda: len(server.server_state.tasks) == 3)
                server.should_exit = True
                response = half.getresponse()
                answers = [(response.status, json.loads(response.read())["error"])]
            for future in asked:
                status, _, body = future.result()
                answers.append((status, body["error"]))
            served.result(4)  # before uvicorn would cancel anything
        finally:
            server.should_exit = True
            go_on.set()
    for status, error in answers:
        assert (status, error["type"], error["code"]) == (503, "server_error", "shutting_down")
    assert not re.search("Cancel|Traceback", capfd.readouterr().err)


def test_prompts_that_are_not_tokens_yet_at_the_end_are_told(tmp_path, monkeypatch):
    """More of them than threads: none is answered, nobody waits for them, and nobody else can connect."""
    write(tmp_path)
    server = Server(_parse(["--weights", str(tmp_path), "--rows", "1", "--context", "64", "--no-embeddings"]))
    going, go_on = [], threading.Event()

    def encode(self, text, **options):
        going.append(text)
        go_on.wait(20)
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    with socket.create_server(("127.0.0.1", 0)) as bound, concurrent.futures.ThreadPoolExecutor(21) as pool:
        served = pool.submit(server.serve_at, bound)
        try:
            address = f"http://127.0.0.1:{bound.getsockname()[1]}"
            body = json.dumps({"model": tmp_path.name, "prompt": "a", "max_tokens": 1})
            asked = [pool.submit(send, address, "POST", "/v1/completions", body) for _ in range(20)]
            until(lambda: len(server.server_state.tasks) == 20 and going)
            server.should_exit = True
            for future in asked:
                status, _, answer = future.result(4)
                assert (status, answer["error"]["code"]) == (503, "shutting_down")
            served.result(4)
            with pytest.raises(ConnectionRefusedError):
                send(address, "GET", "/health")
        finally:
            server.should_exit = True
            go_on.set()
    assert len(going) < 20  # those that waited for a thread never began


def test_the_name_of_a_model(tmp_path, monkeypatch):
    """A folder's dots belong to its name."""
    folder, file = tmp_path / "Qwen3-0.6B", tmp_path / "Qwen3-0.6B.Q4_K_M.gguf"
    write(folder)
    file.touch()
    monkeypatch.chdir(folder)
    server = Server(_parse(["--weights", ".", "--no-embeddings", "--rows", "1", "--context", "64"]))
    try:
        with serving(server.config.app) as address:
            assert [model["id"] for model in send(address, "GET", "/v1/models")[2]["data"]] == ["Qwen3-0.6B"]
    finally:
        server._engine.close()
    assert [name_of(path) for path in (folder, file)] == ["Qwen3-0.6B", "Qwen3-0.6B.Q4_K_M"]


def test_a_name_of_ones_own(tmp_path):
    """Clients ask for the model by it, and answers have it."""
    write(tmp_path)
    options = [
        "--weights",
        str(tmp_path),
        "--no-embeddings",
        "--rows",
        "1",
        "--context",
        "64",
        "--name",
        "house/model-1",
    ]
    server = Server(_parse(options))
    try:
        with serving(server.config.app) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="any") as client:
            assert [model.id for model in client.models.list()] == ["house/model-1"]
            assert client.models.retrieve("house/model-1").id == "house/model-1"
            answer = client.completions.create(model="house/model-1", prompt="a", max_tokens=2)
            assert answer.model == "house/model-1"
            with pytest.raises(openai.NotFoundError, match='model: expected "house/model-1"; got'):
                client.completions.create(model=tmp_path.name, prompt="a")
    finally:
        server._engine.close()


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    written = capsys.readouterr().out
    assert "--max-queue N" in written
    assert "--name NAME" in written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "65536"], "expected --port from 0 to 65535; got 65536"),
        (["--port", "many"], "argument --port: invalid int value: 'many'"),
        (["--rows", "0"], "expected --rows of 1 or more; got 0"),
        (["--context", "0"], "expected --context of 1 or more; got 0"),
        (["--max-queue", "-1"], "expected --max-queue of 0 or more; got -1"),
        (["--timeout", "0"], "expected --timeout above 0; got 0.0"),
        (["--timeout", "nan"], "expected --timeout above 0; got nan"),
        (["--name", " "], "expected --name of one character or more; got ' '"),
        (["--api-key", ""], "expected --api-key of ASCII letters, digits and signs; got ''"),
        (["--api-key", "a b"], "expected --api-key of ASCII letters, digits and signs; got 'a b'"),
        (["--cors", "localhost"], r"expected --cors of SCHEME://HOST:PORT or \*; got 'localhost'"),
        (["--cors", "http://a/"], r"expected --cors of SCHEME://HOST:PORT or \*; got 'http://a/'"),
        (["--embeddings", ".", "--no-embeddings"], "expected --embeddings or --no-embeddings; got both"),
        (["--host", "no.such.host.invalid"], "expected to listen at no.such.host.invalid, port 8000; got: .*"),
        (
            ["--port", "0", "--weights", "/no/such/file.gguf"],
            "/no/such/file.gguf: expected a file; got a path that does not exist.*",
        ),
        (["--port", "0", "--embeddings", "/no/such"], "/no/such: expected a model's folder; got a path that.*"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert re.fullmatch(rf"serve: error: {message}\n", written.err), written.err


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 2
    error = f"serve: error: expected to listen at 127.0.0.1, port {port}; got: Address already in use\n"
    assert capsys.readouterr().err == error


def test_a_port_that_is_taken_while_the_models_load(tmp_path, monkeypatch, capsys):
    """Two programs may bind it, of which one can listen."""
    write(tmp_path)
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    class Slow(Server):
        def serve_at(self, bound):
            taken.bind(bound.getsockname())
            taken.listen()
            super().serve_at(bound)
            raise AssertionError

    monkeypatch.setattr("models.serve.server.Server", Slow)
    options = ["--port", "0", "--weights", str(tmp_path)]
    before = signal.getsignal(signal.SIGTERM)
    with taken:
        assert main([*options, "--rows", "1", "--context", "64", "--no-embeddings"]) == 2
        port = taken.getsockname()[1]
    signal.signal(signal.SIGTERM, before)  # which the program has set
    error = f"serve: error: expected to listen at 127.0.0.1, port {port}; got: Address already in use\n"
    assert capsys.readouterr().err.rpartition("\r")[2] == error  # after the bars of what took long


def test_without_the_extra(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "models.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main([]) == 2
    message = "serve: error: expected the extra serve; got no uvicorn. Run `pip install '.[serve]'`.\n"
    assert capsys.readouterr().err == message
