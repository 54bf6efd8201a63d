"""Prompts on their way to the model, and in front of its answer: long ones, many at a time, and echoed ones."""

import dataclasses
import json
import re
import threading
import time
from typing import Any

import openai
import pytest

from models.decoding.answer import Answer
from models.decoding.batch import Batch
from models.serve.app import make_app
from models.serve.engine import Engine, Event
from models.serve.language import Language
from models.tokens.huggingface_tokenizer import read_vocabulary
from models.tokens.tokenizer import TextTooLong, Tokenizer

from .test_huggingface import SIZE, byte_level
from .test_sentencepiece import Told
from .test_serve import client, send, serving, until
from .test_tokenizer import SMALL_METADATA


LONGEST = "\u1fbe\u0308\u0301"  # 7 bytes, of which NFC makes 2
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def folder_tokenizer(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(read_vocabulary(tmp_path, SIZE))


@pytest.mark.parametrize("kind", ["a file", "a folder"])
def test_other_threads_run_while_a_long_text_becomes_tokens(kind, tokenizer, folder_tokenizer):
    encode = {"a file": tokenizer, "a folder": folder_tokenizer}[kind].encode
    text, longest, is_done = "The sea, the sea. " * 55_000, 0.0, threading.Event()

    def tick():
        nonlocal longest
        before = time.monotonic()
        while not is_done.wait(0.005):
            longest, before = max(longest, time.monotonic() - before), time.monotonic()
        longest = max(longest, time.monotonic() - before)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        assert len(encode(text)) > 200_000
    finally:
        is_done.set()
        thread.join()
    assert longest < 0.3


@pytest.mark.parametrize("kind", ["a file", "a file that is normalised", "a folder"])
def test_no_text_that_fits_is_too_long(kind, folder_tokenizer):
    metadata = {"a file": SMALL_METADATA, "a file that is normalised": SMALL_METADATA | {"tokenizer.ggml.pre": "qwen2"}}
    tokenizer = folder_tokenizer if kind == "a folder" else Tokenizer(metadata[kind])
    for text in ("a", LONGEST, "<|im_end|>", "<user é>", "12"):
        tokens = tokenizer.encode(text * 50)
        assert tokenizer.encode(text * 50, max_bytes=len(tokens) * tokenizer.longest) == tokens
    with pytest.raises(TextTooLong, match=r"\d+ bytes, which are more"):
        tokenizer.encode("a" * (10 * tokenizer.longest + 1), max_bytes=10 * tokenizer.longest)


class Encoder:
    """A tokenizer that says how often it encodes a text, and waits for `go_on` then."""

    def __init__(self, tokenizer):
        self.count, self.go_on = 0, threading.Event()
        self._encode = tokenizer._vocabulary.encode
        self.tokenizer = Tokenizer(dataclasses.replace(tokenizer._vocabulary, encode=self.encode))

    def encode(self, text, is_first):
        self.count += 1
        assert self.go_on.wait(20)
        return self._encode(text, is_first)


@pytest.fixture
def encoder(tokenizer):
    encoder = Encoder(tokenizer)
    yield encoder
    encoder.go_on.set()


def test_a_text_that_is_surely_too_long_is_not_encoded(encoder):
    engine: Any = Told()
    with serving(make_app(Language("small", engine, encoder.tokenizer, timeout=60))) as address:
        for path, field in (
            (TEXT, {"prompt": "word " * 800_000}),
            (CHAT, {"messages": [{"role": "user", "content": "word " * 800_000}]}),
        ):
            status, _, body = send(address, "POST", path, json.dumps({"model": "small", **field}))
            (name,) = field
            assert (status, body["error"]["param"]) == (400, name)
            assert body["error"]["code"] == "context_length_exceeded"
            message = r"expected less than 64 tokens, with room for an answer; got 4000\d{3} bytes, which are more. Shorten it."
            assert re.search(message, body["error"]["message"])
    assert encoder.count == 0


def test_a_full_queue_refuses_before_a_prompt_becomes_tokens(encoder, model):
    engine = Engine(Batch(model, widths=[1], room=256, longest_chunk=32), rows=1, max_queue=0)
    app = make_app(Language("small", engine, encoder.tokenizer, timeout=60))
    body = json.dumps({"model": "small", "prompt": "a", "max_tokens": 1})
    answers = []
    with serving(app) as address:
        first = threading.Thread(target=lambda: answers.append(send(address, "POST", TEXT, body)))
        first.start()
        until(lambda: encoder.count == 1)
        status, headers, refused = send(address, "POST", TEXT, body)
        assert (status, headers["retry-after"], refused["error"]["code"]) == (503, "1", "overloaded")
        assert (encoder.count, engine.num_requests) == (1, 1)
        encoder.go_on.set()
        first.join()
        until(lambda: engine.num_requests == 0)
        assert [status for status, *_ in answers] == [200]
        send(address, "POST", TEXT, json.dumps({"model": "small", "prompt": ""}))  # which is refused
        assert send(address, "POST", TEXT, body)[0] == 200
    engine.close()


class Ended(Told):
    """An engine whose answer is these tokens, and ends then."""

    def __init__(self, tokens, finish):
        self._tokens, self._finish = tokens, finish

    def submit(self, request, deliver, deadline):
        for token in self._tokens:
            deliver(Event(request.answer.push(token), None))
        deliver(Event(request.answer.end(self._finish), self._finish))


@pytest.mark.parametrize("cut", range(1, 9))
def test_an_echo_is_one_text_with_its_answer(cut, tokenizer):
    """Also where a character begins in the prompt's tokens and ends in the answer's, or does not end."""
    tokens = tokenizer.encode("é日本😀👍")
    assert len(tokens) > 9
    for end in (len(tokens), cut + 1):
        engine: Any = Ended(tokens[cut:end], "max_tokens")
        app = make_app(Language("small", engine, tokenizer, timeout=60))
        with serving(app) as address, client(address) as opened:
            options = {"model": "small", "prompt": tokens[:cut], "echo": True}
            assert opened.completions.create(**options).choices[0].text == tokenizer.decode(tokens[:end])
            chunks = opened.completions.create(**options, stream=True)
            assert "".join(chunk.choices[0].text for chunk in chunks) == tokenizer.decode(tokens[:end])


def test_strings_that_end_an_answer_are_not_looked_for_in_the_echo(tokenizer):
    prompt, said = tokenizer.encode("a stop, a"), tokenizer.encode(" b, a stop")
    answer = Answer(tokenizer, ["a stop", ", a b"], echo=prompt)
    text = "".join(map(answer.push, said))
    assert (answer.echoed + text, answer.finish, answer.stop_string) == ("a stop, a b, ", "stop_string", "a stop")


def test_a_stream_that_is_interrupted_has_all_its_text(tokenizer):
    """Also what might have become a string that ends it, and half a character."""
    tokens = tokenizer.encode("Hello, wor") + tokenizer.encode("😀")[:1]
    engine: Any = Ended(tokens, "interrupted")
    app = make_app(Language("small", engine, tokenizer, timeout=60))
    with serving(app) as address, client(address) as opened:
        options = {"model": "small", "prompt": "a", "stop": ["world"]}
        texts = (chunk.choices[0].text for chunk in opened.completions.create(**options, stream=True))
        said = []
        with pytest.raises(openai.APIError, match="the server is shutting down: the answer has no end"):
            said.extend(texts)
        assert "".join(said) == "Hello, wor\ufffd"
        with pytest.raises(openai.InternalServerError, match="the server is shutting down") as caught:
            opened.completions.create(**options)
        assert caught.value.status_code == 503
