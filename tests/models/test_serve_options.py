"""Options of requests that change logits, as OpenAI defines them, and pages of other origins."""

import contextlib
import http.client

import numpy as np
import openai
import pytest

from models.decoding.answer import Answer
from models.decoding.batch import Batch, Request
from models.decoding.chooser import Bias, Choice, Chooser
from models.decoding.generator import Generator
from models.decoding.reader import Reader
from models.decoding.sampling import Sampling
from models.serve.app import make_app
from models.serve.engine import Engine
from models.serve.language import Language

from .test_sentencepiece import Told
from .test_serve import client, serving


NAME, COUNT = "small", 24


@pytest.fixture(scope="module")
def engine(model):
    engine = Engine(Batch(model, widths=[1, 2], room=256, longest_chunk=32), rows=2, max_queue=8)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def opened(engine, tokenizer):
    with serving(make_app(Language(NAME, engine, tokenizer, timeout=60))) as address, client(address) as opened:
        yield opened


def as_defined(model, tokenizer, prompt, bias, penalty=1.0):
    """Greedy tokens, by NumPy: the counts are of the answer's tokens, and the prompt is another matter."""
    reader, tokens, counts = Reader(model, 256), tokenizer.encode(prompt), np.zeros(model.config.vocab_size)
    seen, answer, logits = set(tokens), [], np.zeros(0)
    while len(answer) < COUNT:
        reader.forget([*tokens, *answer])
        for chunk in reader.chunks([*tokens, *answer][len(reader.tokens) :]):
            logits = np.asarray(reader.read(chunk))[0].astype(np.float64)
        for token in seen if penalty != 1 else ():
            logits[token] *= penalty if logits[token] < 0 else 1 / penalty
        logits -= counts * bias.get("frequency_penalty", 0) + (counts > 0) * bias.get("presence_penalty", 0)
        for token, value in bias.get("logit_bias", {}).items():
            logits[int(token)] += value
        answer.append(int(logits.argmax()))
        if answer[-1] in tokenizer.stop_tokens:
            break
        counts[answer[-1]] += 1
        seen.add(answer[-1])
    return tokenizer.decode(answer)


PROMPT = "My favourite animals are the cat, the"


@pytest.mark.parametrize(
    "bias",
    [
        {"frequency_penalty": 0.7},
        {"presence_penalty": 2.0},
        {"presence_penalty": -1.5, "frequency_penalty": -0.5},
        {"logit_bias": {"260": -100.0, "28": 3}},
        {"frequency_penalty": 1.1, "presence_penalty": 0.4, "logit_bias": {"260": 2.5, "3732": -3}},
    ],
)
def test_a_bias_is_what_it_is_defined_as(bias, opened, model, tokenizer):
    options = {"model": NAME, "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0}
    plain = opened.completions.create(**options).choices[0].text
    text = opened.completions.create(**options, **bias).choices[0].text
    assert text == as_defined(model, tokenizer, PROMPT, bias) != plain
    assert opened.completions.create(**options).choices[0].text == plain  # the next one has nothing of it
    again = opened.completions.create(**options, **bias, extra_body={"repetition_penalty": 1.3})
    assert again.choices[0].text == as_defined(model, tokenizer, PROMPT, bias, penalty=1.3)


def test_a_bias_decides_what_is_drawn(opened, tokenizer):
    (token,) = tokenizer.encode(" sea")
    drawn = opened.completions.create(model=NAME, prompt="a", max_tokens=5, temperature=2, logit_bias={str(token): 100})
    assert drawn.choices[0].text == " sea" * 5


def test_rows_with_and_without_a_bias_share_a_program(model, tokenizer):
    """And each has what it has alone."""

    def answers(batch, *biases):
        requests = [Request(prompt, Answer(tokenizer), 12, Choice(Sampling(), 0, bias)) for bias in biases]
        for request in requests:
            batch.add(request)
        list(batch.run())
        return [request.answer.text for request in requests]

    prompt, (sea,) = tokenizer.encode("The sea, the sea, the sea, the sea,"), tokenizer.encode(" sea")
    batch, biases = Batch(model, widths=[1, 3], room=256), [Bias(frequency=1.0), None, Bias(of_tokens={sea: -100.0})]
    together = answers(batch, *biases)
    assert together == [answers(batch, bias)[0] for bias in biases]
    assert len(set(together)) == 3
    alone = list(Generator(model, room=256).generate(prompt, max_tokens=12))
    assert together[1] == tokenizer.decode(alone)


def test_programs_of_one_text_refuse_a_bias(model):
    choice = Choice(bias=Bias(presence=1.0))
    with pytest.raises(ValueError, match="Choice: expected no bias for a program of one text; got one"):
        Reader(model, 256).prepare_step(choice)
    assert Choice(bias=Bias()).steps == Sampling().steps


def test_counts_are_of_the_answer_alone():
    """And of the answer that was begun last."""
    choice, chooser = Choice(bias=Bias(frequency=0.25, presence=1.0, of_tokens={2: 0.5})), Chooser(4)
    choice.start([0, 0, 1])
    logits = np.asarray([[2.0, 1.9, 0.0, 0.0]], np.float32)
    assert [chooser.choose(logits, i, choice) for i in range(5)] == [0, 1, 0, 1, 0]
    np.testing.assert_allclose([choice.added[token] for token in range(3)], [-1.75, -1.5, 0.5])
    choice.start([3])
    assert choice.added == {2: 0.5}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"frequency_penalty": 2.1}, r"frequency_penalty: expected a number from -2 to 2; got 2\.1\."),
        ({"presence_penalty": "1"}, r'presence_penalty: expected a number from -2 to 2; got "1"\.'),
        ({"logit_bias": {"50": 101}}, r"logit_bias: expected an object with numbers from -100 to 100 by tokens; got"),
        ({"logit_bias": {"50": True}}, r"logit_bias: expected an object with numbers from -100 to 100"),
        ({"logit_bias": {"sea": 1}}, r"logit_bias: expected an object with numbers from -100 to 100"),
        ({"logit_bias": [1]}, r"logit_bias: expected an object with numbers from -100 to 100"),
        ({"logit_bias": {"49152": 1}}, r"logit_bias: expected tokens from 0 to 49151; got others\."),
    ],
)
def test_a_bias_that_is_refused(fields, message, opened):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        opened.completions.create(model=NAME, prompt="a", extra_body=fields)
    assert caught.value.param == next(iter(fields))


def headers_of(address, method, **headers):
    """The status and the headers of an answer to a page, which asks with these."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
    with contextlib.closing(connection):
        connection.request(
            method, "/v1/models", headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        response = connection.getresponse()
        return response.status, response.headers


def test_pages_of_named_origins_may_ask(tokenizer):
    """A browser asks first whether it may send a key; errors are for the page, too."""
    page, other = "http://localhost:3000", "http://evil.example"
    language = Language(NAME, Told(), tokenizer, timeout=60)  # pyright: ignore[reportArgumentType]
    with serving(make_app(language, api_key="sesame", origins=[page])) as address:
        asks = {
            "Access_Control_Request_Method": "POST",
            "Access_Control_Request_Headers": "authorization,x-stainless-os",
        }
        status, headers = headers_of(address, "OPTIONS", Origin=page, **asks)
        assert (status, headers["access-control-allow-origin"]) == (200, page)
        assert headers["access-control-allow-headers"] == "authorization,x-stainless-os"
        assert headers_of(address, "OPTIONS", Origin=other, **asks)[0] == 400
        status, headers = headers_of(address, "GET", Origin=page)
        assert (status, headers["access-control-allow-origin"]) == (401, page)
        assert headers["access-control-expose-headers"] == "Retry-After"
        status, headers = headers_of(address, "GET", Origin=other, Authorization="Bearer sesame")
        assert (status, headers["access-control-allow-origin"]) == (200, None)
        with client(address, api_key="sesame", default_headers={"Origin": page}) as opened:
            response = opened.models.with_raw_response.list()
            assert response.headers["access-control-allow-origin"] == page
    with serving(make_app(language)) as address:
        assert headers_of(address, "GET", Origin=page)[1]["access-control-allow-origin"] is None
