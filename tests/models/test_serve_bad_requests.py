"""Requests that cannot be met, by the thousand: each gets a clear error, and nothing changes."""

import asyncio
import gc
import json
import os
import random
import re
import socket

import pytest

from models.decoding.batch import Batch
from models.embedder import Embedder, default_folder
from models.serve.app import make_app
from models.serve.embeddings import Embeddings
from models.serve.engine import Engine
from models.serve.language import Language

from ..stress.conftest import resident
from .test_serve import NAME, send, serving


CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
VALID = {
    CHAT: {"model": NAME, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 3, "temperature": 0},
    TEXT: {"model": NAME, "prompt": "The sea is", "max_tokens": 3, "temperature": 0},
    VECTORS: {"model": "MiniLM", "input": ["hello"]},
}
# Values that no field takes, and those that one field does not take.
NEVER = [[[]], {"a": 1}, -1e300, 10**400, [None], [{}], 2**63]
WRONG = {
    "model": ["gpt-4", "", 3, True],
    "stream": ["true", 1, 0],
    "temperature": [-0.1, 2.1, "1", True],
    "top_p": [1.1, -1],
    "top_k": [0.5, -1, False],
    "seed": [1.5, "7", True],
    "max_tokens": [-1, 1.0, "3", True],
    "stop": ["", ["a"] * 5, [""], "x" * 1001, 3, [3]],
    "n": [3, 129, 0, True, "1"],
    "logit_bias": [{"50": 101}, {"50": "1"}, {"x": 1}, {"-1": 1}, {"50000": 1}, [1]],
    "presence_penalty": [2.1, "0", False],
    "stream_options": [{"include_usage": True}, [], 1],
}
BAD_MESSAGES = [
    {"role": "user"},
    {"role": "user", "content": 3},
    {"role": "user", "content": [{"type": "image_url"}]},
    {"role": ["user"], "content": "x"},
    {"role": "tool", "content": "x"},
    {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    {"role": "assistant", "content": None, "refusal": 3},
    {"role": "assistant", "content": [{"type": "refusal", "text": "x"}]},
    {"role": "user", "content": None},
    {"role": "user", "content": "x", "refusal": "no"},
    {"role": "user", "content": [{"type": "refusal", "refusal": "no"}]},
    {"role": "user", "content": "x", "name": 3},
]
WRONG_OF = {
    CHAT: {
        "messages": [[], {}, "hello", [3], *([message] for message in BAD_MESSAGES)],
        "max_completion_tokens": [0, "3", 4],
        "logprobs": ["true", 0],
        "top_logprobs": [21, -1, True, 1],
        "tools": [[{"type": "function"}]],
        "response_format": [{"type": "json_object"}, "text"],
        **WRONG,
        "max_tokens": [0, *WRONG["max_tokens"]],
    },
    TEXT: {
        "prompt": [
            "",
            [],
            3,
            {},
            ["a", ""],
            [[1], []],
            [[["a"]]],
            [1.5],
            [True],
            [-1],
            [10**6],
            ["a", 1],
            ["a"] * 99,
            "word " * 300,
        ],
        "echo": ["yes", 1],
        "logprobs": [-1, 6, False],
        "suffix": ["x"],
        "best_of": [2],
        **WRONG,
    },
    VECTORS: {
        "input": [[], 3, {}, [1, 2], [[1]], ["a", 2], ["a"] * 2049, "word " * 300],
        "encoding_format": ["hex", 3],
        "dimensions": [3, 0, "384"],
        "model": WRONG["model"],
    },
}
BODIES = [b"", b"{", b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b'{"a":' * 100_000]
BODIES += [b"\x00" * 9, b'{"max_tokens": ' + b"9" * 5000 + b"}", b"\xef\xbb\xbf{}", b"{}" * 2, b"{'model': 1}"]


@pytest.fixture(scope="module")
def engine(model):
    engine = Engine(Batch(model, widths=[1], room=256, longest_chunk=32), rows=1, max_queue=1)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def app(engine, tokenizer):
    embeddings = Embeddings("MiniLM", Embedder(default_folder()), max_queue=1, timeout=60)
    return make_app(Language(NAME, engine, tokenizer, timeout=60), embeddings)


async def call(app, method, path, body):
    """The status and the body of an answer."""
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": [], "http_version": "1.1"}
    messages, sent = [{"type": "http.request", "body": body}], []
    done = asyncio.Event()

    async def receive():
        if messages:
            return messages.pop()
        await done.wait()
        return {"type": "http.disconnect"}

    async def answer(message):
        sent.append(message)

    await app(scope, receive, answer)
    done.set()
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def bad_request(chance):
    """A method, a path and a body, one thing of which is wrong."""
    path = chance.choice([CHAT, TEXT, VECTORS])
    body = dict(VALID[path])
    match chance.randrange(8):
        case 0:
            return "POST", path, chance.choice(BODIES)
        case 1:
            return "POST", path, chance.randbytes(chance.randrange(1, 99))
        case 2:
            whole = json.dumps(body).encode()
            return "POST", path, whole[: chance.randrange(len(whole))]
        case 3:
            return chance.choice(
                [("GET", path, b""), ("PUT", path, b"{}"), ("POST", f"{path}/x", b""), ("GET", "//", b"")]
            )
        case 4:
            del body[chance.choice(["model", {CHAT: "messages", TEXT: "prompt", VECTORS: "input"}[path]])]
        case 5:
            body[chance.choice(["a", "temprature", "", "\ud800", "x" * 999, "functions"])] = chance.choice(
                [1, "", {}, [1]]
            )
        case 6:
            body[chance.choice([*WRONG_OF[path]])] = chance.choice(NEVER)
        case 7:
            name = chance.choice([*WRONG_OF[path]])
            body[name] = chance.choice(WRONG_OF[path][name])
    return "POST", path, json.dumps(body).encode()


async def refused(app, chance, count):
    """Send bad requests, and return the messages of the errors."""
    messages = set()
    for _ in range(count):
        request = bad_request(chance)
        status, body = await call(app, *request)
        assert status in (400, 404, 405), request
        error = json.loads(body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert re.fullmatch(r".+: expected [^\n]+\.", error["message"]), error["message"]
        messages.add(error["message"])
    return messages


def test_ten_thousand_bad_requests_change_nothing(app, engine):
    async def all_of_them():
        chance = random.Random(0)
        before = [await call(app, "POST", path, json.dumps(body).encode()) for path, body in VALID.items()]
        assert [status for status, _ in before] == [200] * 3
        await refused(app, chance, 500)
        gc.collect()
        count = len(gc.get_objects())
        messages = await refused(app, chance, 9500)
        gc.collect()
        assert len(gc.get_objects()) < count + 500
        after = [await call(app, "POST", path, json.dumps(body).encode()) for path, body in VALID.items()]
        assert [answer(body) for _, body in after] == [answer(body) for _, body in before]
        return messages

    messages = asyncio.run(all_of_them())
    assert len(messages) > 200
    assert 'temperature: expected a number from 0 to 2; got "1".' in messages
    assert "messages[0].content: expected a string, or a list of parts; got 3." in messages
    assert '"temprature": expected no field of this name, which is not supported. Leave it out.' in messages
    assert 'model: expected "SmolLM2"; got "gpt-4".' in messages
    assert engine.num_requests == 0
    assert not engine._batch.is_busy


def answer(body):
    """Return the parts of an answer that are not of the moment."""
    content = json.loads(body)
    return content.get("choices"), content.get("data"), content["usage"]


def test_bad_requests_over_http_leave_nothing_open(app):
    """Each with a connection of its own."""

    def refused(address, count):
        for _ in range(count):
            method, path, body = bad_request(chance)
            status, _, content = send(address, method, path, body)
            assert status in (400, 404, 405)
            assert content["error"]["type"] == "invalid_request_error"
        gc.collect()
        return len(os.listdir("/proc/self/fd")), resident()

    chance = random.Random(2)
    with serving(app) as address:
        files, before = refused(address, 200)
        open_files, after = refused(address, 400)
    assert open_files <= files + 2  # of connections that are just being closed
    assert after - before < 4 << 20


def test_what_is_not_even_http(app):
    chance = random.Random(1)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    requests = [
        b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        head + b"Content-Length: -1\r\n\r\n",
        head + b"Content-Length: 99\r\n\r\n{}",  # and no more comes
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        head + b"X: " + b"x" * 99_999 + b"\r\n\r\n",
        *(chance.randbytes(200) for _ in range(50)),
    ]
    with serving(app) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        for request in requests:
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(20)
                assert not connection.recv(1).startswith(b"2")
        status, _, body = send(address, "POST", TEXT, json.dumps(VALID[TEXT]))
    assert status == 200
    assert body["usage"]["completion_tokens"] == 3
