"""The server: what a client of OpenAI's gets from it."""

import concurrent.futures
import contextlib
import http.client
import json
import socket
import threading
import time

import numpy as np
import openai
import pytest
import uvicorn

from models.decoding.answer import Answer
from models.decoding.batch import Batch
from models.decoding.generator import Generator
from models.decoding.sampling import Sampling
from models.embedder import Embedder, default_folder
from models.serve.app import MAX_BODY, make_app
from models.serve.embeddings import Embeddings
from models.serve.engine import Engine
from models.serve.language import Language


NAME = "SmolLM2"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
# An answer of as many tokens as there is room for.
LONG = {"model": NAME, "messages": [{"role": "user", "content": "Count from one to two hundred."}], "temperature": 0}


@contextlib.contextmanager
def serving(app):
    """The address of an application, while it runs on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def client(address, **options):
    return openai.OpenAI(base_url=f"{address}/v1", **{"api_key": "any", "max_retries": 0, "timeout": 60.0, **options})


@pytest.fixture(scope="module")
def batch(model):
    return Batch(model, widths=[1, 8], room=512, longest_chunk=32)


@pytest.fixture(scope="module")
def engine(batch):
    engine = Engine(batch, rows=8, max_queue=2)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def embedder():
    return Embedder(default_folder())


@pytest.fixture(scope="module")
def app(engine, tokenizer, batch, embedder):
    language = Language(NAME, engine, tokenizer, timeout=60)
    return make_app(language, Embeddings("MiniLM", embedder, max_queue=2, timeout=60))


@pytest.fixture(scope="module")
def address(app):
    with serving(app) as address:
        yield address


@pytest.fixture(scope="module")
def openai_client(address):
    with client(address) as opened:
        yield opened


@pytest.fixture
def idle(engine):
    """After the test nobody has a row any more, and nobody waits."""
    yield
    until(lambda: engine.num_requests == 0 and not engine._batch.is_busy)


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.01)


def send(address, method, path, body=None, headers=None, timeout=60.0):
    """The status, the headers and the object of an answer."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=timeout)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.headers, json.loads(response.read())


def ask(client, text, **options):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(**{"model": NAME, "messages": messages, "max_tokens": 12, **options})


@pytest.mark.usefixtures("idle")
def test_eight_at_once_say_what_each_says_alone(openai_client, model, tokenizer, batch, engine, monkeypatch):
    def say(about, temperature, seed):
        options = {"temperature": temperature, "seed": seed, "top_p": 0.9, "max_tokens": 32}
        response = ask(openai_client, f"Write a poem about {about}.", **options)
        return response.choices[0].message.content

    subjects = ["the sea", "a cat", "rain", "Rome", "tea", "bread", "a hat", "me"]
    asked = subjects, [0, 0.9, 0, 1.2, 0.7, 0, 2, 0], range(-3, 5)
    alone = list(map(say, *asked))
    read, decode, together = batch.read, batch.decode, []

    def read_when_all_are_there():
        if not together:
            until(lambda: engine.num_requests == 8)
        return read()

    def counted():
        pieces = decode()
        together.append(len(pieces))
        return pieces

    monkeypatch.setattr(batch, "read", read_when_all_are_there)
    monkeypatch.setattr(batch, "decode", counted)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(say, *asked)) == alone
    assert together.count(8) > 10  # tokens that all eight have by one program
    for about, temperature, seed, said in zip(*asked, alone, strict=True):
        if seed == 0:
            answer, sampling = Answer(tokenizer), Sampling(temperature=temperature, top_p=0.9)
            prompt = tokenizer.encode_chat([{"role": "user", "content": f"Write a poem about {about}."}])
            generated = Generator(model, room=256, sampling=sampling, seed=seed).generate(prompt, max_tokens=32)
            answer.take(generated, str, max_tokens=32)
            assert answer.text == said


@pytest.mark.usefixtures("idle")
def test_a_stream_has_the_same_text(openai_client):
    for options in (
        {"messages": FRANCE},
        {"messages": FRANCE, "stop": ["of Fr"]},
        {"messages": FRANCE, "max_tokens": 3},
    ):
        options = {"model": NAME, "temperature": 0, **options}
        whole = openai_client.chat.completions.create(**options)
        chunks = list(
            openai_client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        )
        assert chunks[-1].usage == whole.usage
        assert chunks[-1].choices == []
        (*pieces, last) = [chunk.choices[0] for chunk in chunks[:-1]]
        assert pieces[0].delta.role == "assistant"
        assert "".join(piece.delta.content for piece in pieces) == whole.choices[0].message.content
        assert {piece.finish_reason for piece in pieces} == {None}
        assert last.finish_reason == whole.choices[0].finish_reason
        assert len({chunk.id for chunk in chunks}) == 1
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 3


@pytest.mark.usefixtures("idle")
def test_a_completion(openai_client, tokenizer):
    options = {"model": NAME, "temperature": 0, "max_tokens": 5}
    text = openai_client.completions.create(prompt="The capital of France is", **options).choices[0].text
    assert "Paris" in text
    tokens = tokenizer.encode("The capital of France is")
    echoed = openai_client.completions.create(prompt=[tokens], echo=True, **options)
    assert echoed.choices[0].text == f"The capital of France is{text}"
    assert echoed.usage.prompt_tokens == len(tokens)
    stream = openai_client.completions.create(prompt=tokens, echo=True, stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in stream) == echoed.choices[0].text
    drawn = [ask(openai_client, "Name a colour.", temperature=2).choices[0].message.content for _ in range(3)]
    assert len(set(drawn)) > 1  # without a seed


@pytest.mark.usefixtures("idle")
def test_messages_in_parts_and_of_developers(openai_client, tokenizer):
    parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]
    messages = [{"role": "developer", "content": "Answer."}, {"role": "user", "content": parts, "name": "Ada"}]
    response = openai_client.chat.completions.create(model=NAME, messages=messages, temperature=0)
    assert "Paris" in response.choices[0].message.content
    expected = tokenizer.encode_chat([{"role": "system", "content": "Answer."}, FRANCE[0]])
    assert response.usage.prompt_tokens == len(expected)
    # What came back is sent again.
    messages = [*messages, response.choices[0].message.model_dump(), {"role": "user", "content": "And of Italy?"}]
    response = openai_client.chat.completions.create(model=NAME, messages=messages, temperature=0)
    assert "Rome" in response.choices[0].message.content


@pytest.mark.usefixtures("idle")
def test_who_goes_away_frees_a_row(openai_client, address, batch, engine):
    before = batch.speed.decoded_tokens
    stream = openai_client.chat.completions.create(**LONG, stream=True)
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    assert engine.num_requests == 1
    stream.close()
    until(lambda: engine.num_requests == 0)
    with pytest.raises(TimeoutError):
        send(address, "POST", "/v1/chat/completions", json.dumps(LONG), timeout=0.3)
    until(lambda: engine.num_requests == 0 and not batch.is_busy)
    assert batch.speed.decoded_tokens - before < 200  # of some 900
    assert len(ask(openai_client, "Go on.", temperature=0).choices) == 1


@pytest.mark.usefixtures("idle")
def test_the_queue_is_full(openai_client, engine):
    streams = [openai_client.chat.completions.create(**LONG, stream=True) for _ in range(8)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, openai_client, "Say hello.") for _ in range(2)]
        until(lambda: engine.num_requests == 10)
        with pytest.raises(
            openai.InternalServerError, match="expected fewer requests at a time; the queue is full"
        ) as caught:
            ask(openai_client, "Say hello.")
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
        assert not any(future.done() for future in waiting)
        streams.pop().close()
        assert all(future.result().choices for future in waiting)  # one after the other in that row
    for stream in streams:
        stream.close()


@pytest.mark.usefixtures("idle")
def test_limits_of_time_and_length(engine, tokenizer, openai_client):
    app = make_app(Language(NAME, engine, tokenizer, timeout=1.0))
    with serving(app) as address, client(address) as hurried:
        response = hurried.chat.completions.create(**LONG)
        assert response.choices[0].finish_reason == "length"
        assert 0 < response.usage.completion_tokens < 400
        assert response.choices[0].message.content
        streams = [openai_client.chat.completions.create(**LONG, stream=True) for _ in range(8)]
        with pytest.raises(openai.InternalServerError, match="expected to begin in time; other requests came first"):
            hurried.chat.completions.create(**LONG)
        for stream in streams:
            stream.close()
        with pytest.raises(
            openai.NotFoundError, match='model: expected none, as this server has no model for it; got "MiniLM"'
        ):
            hurried.embeddings.create(model="MiniLM", input="hello")
    text = "word " * 480
    response = openai_client.completions.create(model=NAME, prompt=text, max_tokens=400, temperature=0)
    assert response.choices[0].finish_reason in ("length", "stop")
    assert response.usage.total_tokens <= 512
    message = r"prompt: expected less than 512 tokens, with room for an answer; got 60\d. Shorten it."
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        openai_client.completions.create(model=NAME, prompt="word " * 600)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError, match=f"body: expected at most {MAX_BODY} bytes; got more") as refused:
        openai_client.completions.create(model=NAME, prompt="word " * 900_000)
    assert refused.value.status_code == 413


def test_embeddings(openai_client, embedder):
    lines = ["The cat sleeps.", "", "Stock markets fell sharply today.", "Ein Kätzchen 🐈", *map(str, range(70))]
    expected = embedder.encode(lines)
    for encoding in ("float", "base64", openai.omit):
        response = openai_client.embeddings.create(model="MiniLM", input=lines, encoding_format=encoding)
        vectors = [item.embedding for item in response.data]
        if encoding == "base64":
            assert isinstance(vectors[0], str)
            continue
        np.testing.assert_allclose(vectors, expected, atol=2e-6)
    assert response.usage.prompt_tokens == sum(map(len, embedder.tokenize(lines).sentences))
    (one,) = openai_client.embeddings.create(model="MiniLM", input=lines[0], dimensions=384).data
    np.testing.assert_allclose(one.embedding, expected[0], atol=2e-6)
    with pytest.raises(openai.BadRequestError, match="input: expected at most 256 tokens each; 1 of 2 have more"):
        openai_client.embeddings.create(model="MiniLM", input=["word " * 300, "short"])
    with pytest.raises(openai.BadRequestError, match="dimensions: expected 384, the size of all vectors; got 100"):
        openai_client.embeddings.create(model="MiniLM", input="short", dimensions=100)


def test_models_and_routes(openai_client, address):
    assert [model.id for model in openai_client.models.list()] == [NAME, "MiniLM"]
    assert openai_client.models.retrieve(NAME).object == "model"
    with pytest.raises(openai.NotFoundError, match='model: expected "SmolLM2" or "MiniLM"; got "gpt-4"') as caught:
        openai_client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"
    assert send(address, "GET", "/health")[2] == {"status": "ok", "requests": 0}
    status, _, body = send(address, "GET", "/v1/nothing")
    assert (status, body["error"]["message"]) == (404, "GET /v1/nothing: expected a path of this server.")
    status, headers, body = send(address, "GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert body["error"]["message"] == "GET /v1/completions: expected a method of POST."


def test_a_key(engine, tokenizer):
    app = make_app(Language(NAME, engine, tokenizer, timeout=60), api_key="sesame")
    with serving(app) as address:
        for value in (None, "Bearer sesam", "Bearer s\xe9same", "Basic sesame", "Bearer", "Bearer "):
            status, headers, body = send(address, "GET", "/v1/models", headers=value and {"Authorization": value})
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert body["error"]["code"] == "invalid_api_key"
        assert send(address, "GET", "/health")[0] == 200
        with client(address, api_key="sesame") as opened:
            assert [model.id for model in opened.models.list()] == [NAME]


def test_a_mistake_of_the_engine(model, tokenizer, monkeypatch):
    broken = Batch(model, widths=[1], room=256)
    monkeypatch.setattr(broken, "read", lambda: 1 / 0)
    ended = threading.Event()
    engine = Engine(broken, rows=1, max_queue=1, on_end=ended.set)
    with (
        serving(make_app(Language(NAME, engine, tokenizer, timeout=60))) as address,
        client(address) as opened,
    ):
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="the server is shutting down"):
                ask(opened, "Say hello.")
    assert ended.is_set()
    assert isinstance(engine.error, ZeroDivisionError)


def test_the_end(model, tokenizer, batch, engine):
    """Streams that run are told; who comes later is refused."""
    engine = Engine(Batch(model, widths=[1], room=256, longest_chunk=32), rows=1, max_queue=1)
    with (
        serving(make_app(Language(NAME, engine, tokenizer, timeout=60))) as address,
        client(address) as opened,
    ):
        stream = opened.chat.completions.create(**LONG, stream=True)
        next(stream)
        engine.close()
        with pytest.raises(openai.APIError, match="the server is shutting down: the answer has no end"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="the server is shutting down"):
            ask(opened, "Say hello.")
