"""Servers that speak OpenAI's protocol, each in a process of its own, and a client that streams answers from them."""

import contextlib
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ._process import last_line


ROOT = pathlib.Path(__file__).parents[1]
HOST = "127.0.0.1"
# So long a server may take to start, in which ours compiles, and to answer.
_SECONDS = 180.0


class DidNotStart(Exception):
    """Raised for a server that does not answer. The message is the last line that it said."""


class Server(NamedTuple):
    """A server that runs, and the name of its model."""

    port: int
    model: str


class Answer(NamedTuple):
    """Times of one answer, by `time.perf_counter`: of the request, of the first text, and of the end."""

    start: float
    first: float
    end: float


def free_port() -> int:
    with socket.create_server((HOST, 0)) as bound:
        return bound.getsockname()[1]


@contextlib.contextmanager
def serving(command: Sequence[str], port: int, cores: set[int]) -> Iterator[Server]:
    """Run a server that listens at a port, on these cores alone, until the context ends.

    **Raises:** `DidNotStart`.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        with _on(cores):
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        try:
            model = _wait_for_model(process, port)
            if model is None:
                said.seek(0)
                raise DidNotStart(last_line(said.read()))
            yield Server(port, model)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def _on(cores: set[int]) -> Iterator[None]:
    """Processes that this thread starts may use these cores. By `preexec_fn` they would be forked, which JAX warns of."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _wait_for_model(process: subprocess.Popen[bytes], port: int) -> str | None:
    """Return the name of the server's model once it answers, or `None` if it does not."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end and process.poll() is None:
        connection = http.client.HTTPConnection(HOST, port, timeout=5)
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/v1/models")
            return json.load(connection.getresponse())["data"][0]["id"]
        time.sleep(0.1)
    return None


def ask_together(server: Server, prompts: Sequence[str], tokens: int) -> list[Answer]:
    """Stream a greedy answer to each prompt, all at once, each by a client of its own.

    **Raises:** `RuntimeError` if one of them has not so many tokens.
    """
    answers: list[Answer | Exception] = []
    barrier = threading.Barrier(len(prompts))

    def client(prompt: str) -> None:
        try:
            answers.append(_ask(server, prompt, tokens, barrier))
        except Exception as error:
            answers.append(error)
            barrier.abort()  # the others wait for nobody

    threads = [threading.Thread(target=client, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Of several errors the first one: others are that it stopped.
    for answer in answers:
        if isinstance(answer, Exception):
            raise RuntimeError(f"port {server.port}, {server.model}: {answer}") from answer
    return [answer for answer in answers if isinstance(answer, Answer)]


def _ask(server: Server, prompt: str, tokens: int, barrier: threading.Barrier) -> Answer:
    """Not by the package `openai`, which takes more of the processor that both share."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
    }
    connection = http.client.HTTPConnection(HOST, server.port, timeout=_SECONDS)
    with contextlib.closing(connection):
        connection.connect()
        barrier.wait(_SECONDS)
        start = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"expected an answer; got status {response.status}: {response.read()[:300]!r}")
        first, finish = None, None
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
            if first is None and choice["delta"].get("content"):
                first = time.perf_counter()
            finish = choice["finish_reason"] or finish
        end = time.perf_counter()
    if finish != "length" or first is None:
        raise RuntimeError(f"expected {tokens} tokens after {prompt!r}; got an answer that ended before: {finish}")
    return Answer(start, first, end)
