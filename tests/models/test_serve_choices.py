"""Several choices of one request: `n`."""

import json

import openai
import pytest

from models.decoding.batch import Batch
from models.serve.app import make_app
from models.serve.engine import Engine
from models.serve.language import Language

from .test_serve import client, send, serving, until


NAME = "small"
POEM = [{"role": "user", "content": "Write a poem about the sea."}]
CHAT = {"model": NAME, "messages": POEM, "max_tokens": 12, "temperature": 1.0, "seed": 7}
LONG = {"model": NAME, "messages": [{"role": "user", "content": "Count from one to two hundred."}], "temperature": 0}


@pytest.fixture(scope="module")
def batch(model):
    return Batch(model, widths=[1, 3], room=512, longest_chunk=32)


@pytest.fixture(scope="module")
def engine(batch):
    engine = Engine(batch, rows=3, max_queue=2)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def opened(engine, tokenizer):
    with serving(make_app(Language(NAME, engine, tokenizer, timeout=60))) as address, client(address) as opened:
        yield opened


@pytest.fixture(autouse=True)
def idle(engine):
    """After the test nobody has a row any more, and nobody waits."""
    yield
    until(lambda: engine.num_requests == 0 and not engine._batch.is_busy)


def test_each_choice_has_a_seed_of_its_own(opened):
    """The one after that of the choice before, so that each can be asked for by itself."""
    whole = opened.chat.completions.create(**CHAT, n=3)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    again = opened.chat.completions.create(**CHAT, n=3)
    assert [choice.message.content for choice in again.choices] == texts
    alone = [opened.chat.completions.create(**{**CHAT, "seed": 7 + i}) for i in range(3)]
    assert [response.choices[0].message.content for response in alone] == texts
    assert whole.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert whole.usage.completion_tokens == sum(response.usage.completion_tokens for response in alone)
    unseeded = opened.chat.completions.create(**{**CHAT, "seed": None, "n": 3})
    assert len({choice.message.content for choice in unseeded.choices}) == 3
    last = opened.chat.completions.create(**{**CHAT, "seed": 2**63 - 1}, n=2).choices[1].message.content
    assert last == opened.chat.completions.create(**{**CHAT, "seed": 0}).choices[0].message.content


def test_the_prompt_is_read_once(opened, batch):
    """But for its last token, after which each choice begins."""
    before = batch.speed.prompt_tokens
    response = opened.completions.create(model=NAME, prompt="word " * 100, n=3, max_tokens=2)
    assert batch.speed.prompt_tokens - before <= response.usage.prompt_tokens + 2


@pytest.mark.parametrize("stop", [None, ["the", "\n"]])
def test_a_stream_says_whose_each_piece_is(stop, opened):
    options = {**CHAT, "stop": stop, "n": 3}
    whole = opened.chat.completions.create(**options)
    *chunks, last = opened.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage) == ([], whole.usage)
    pieces = [choice for chunk in chunks for choice in chunk.choices]
    assert len(pieces) == len(chunks)
    for choice in whole.choices:
        first, *middle, end = [piece for piece in pieces if piece.index == choice.index]
        assert (first.delta.role, first.delta.content, end.delta.content) == ("assistant", "", None)
        assert "".join(piece.delta.content for piece in middle) == choice.message.content
        assert {piece.finish_reason for piece in (first, *middle)} == {None}
        assert end.finish_reason == choice.finish_reason


def test_choices_of_a_completion(opened):
    options = {"model": NAME, "prompt": "My favourite animal is", "temperature": 1.5, "seed": 1, "n": 2}
    whole = opened.completions.create(**options, echo=True, max_tokens=8)
    texts = [choice.text for choice in whole.choices]
    assert texts[0] != texts[1]
    assert all(text.startswith("My favourite animal is") for text in texts)
    streamed = ["", ""]
    for chunk in opened.completions.create(**options, echo=True, max_tokens=8, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    same = opened.completions.create(**options, max_tokens=8, best_of=2)  # as many as are made anyway
    assert ["My favourite animal is" + choice.text for choice in same.choices] == texts
    with pytest.raises(openai.BadRequestError, match="best_of: expected 2, all that is supported; got 3"):
        opened.completions.create(**options, best_of=3)


@pytest.mark.parametrize("n", [1, 2])
def test_several_prompts(n, opened, tokenizer):
    """Each has the choices that it has alone, and they come in the order of the prompts."""
    prompts = ["The sea is", tokenizer.encode("One, two, three"), "A poem:"][: 4 - n]
    options = {"model": NAME, "max_tokens": 6, "temperature": 1.0, "seed": 3, "n": n}
    whole = opened.completions.create(**options, prompt=prompts)
    assert [choice.index for choice in whole.choices] == list(range(n * len(prompts)))
    alone = [opened.completions.create(**options, prompt=prompt) for prompt in prompts]
    assert [choice.text for choice in whole.choices] == [choice.text for each in alone for choice in each.choices]
    assert whole.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone)
    assert whole.usage.completion_tokens == sum(each.usage.completion_tokens for each in alone)
    texts = [""] * len(whole.choices)
    for chunk in opened.completions.create(**options, prompt=prompts, echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    said = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts for _ in range(n)]
    assert texts == [prompt + choice.text for prompt, choice in zip(said, whole.choices, strict=True)]
    with pytest.raises(openai.BadRequestError, match=r"prompt: expected at most 5, .+; got 6"):
        opened.completions.create(**{**options, "n": 2}, prompt=["a", "b", "c"])


def test_each_choice_has_a_place_in_the_queue(opened, engine):
    with pytest.raises(
        openai.BadRequestError, match=r"n: expected at most 5, .+; got 6\. Ask for fewer.+--max-queue"
    ) as caught:
        opened.chat.completions.create(**CHAT, n=6)
    assert caught.value.param == "n"
    stream = opened.chat.completions.create(**LONG, stream=True)
    next(stream)
    assert engine.num_requests == 1
    with pytest.raises(openai.InternalServerError, match="the queue is full"):
        opened.chat.completions.create(**CHAT, n=5)
    assert len(opened.chat.completions.create(**CHAT, n=4).choices) == 4
    stream.close()
    until(lambda: engine.num_requests == 0)
    assert len(opened.chat.completions.create(**CHAT, n=5).choices) == 5  # two of them after others


def test_who_goes_away_frees_all_rows(opened, batch, engine):
    before = batch.speed.decoded_tokens
    stream = opened.chat.completions.create(**LONG, n=4, stream=True)
    for _, _chunk in zip(range(8), stream, strict=False):
        pass
    assert engine.num_requests == 4
    stream.close()
    until(lambda: engine.num_requests == 0 and not batch.is_busy)
    assert batch.speed.decoded_tokens - before < 500  # of some 1,800


def test_choices_that_time_leaves_out_are_empty(opened, engine, tokenizer):
    """The answer has begun, with the choices that have rows."""
    opened.chat.completions.create(**{**CHAT, "max_tokens": 2}, n=3)  # so that all is compiled
    with serving(make_app(Language(NAME, engine, tokenizer, timeout=1.0))) as address, client(address) as hurried:
        choices = hurried.chat.completions.create(**LONG, n=5).choices
    assert {choice.finish_reason for choice in choices} == {"length"}
    assert [bool(choice.message.content) for choice in choices] == [True] * 3 + [False] * 2


def test_all_choices_are_told_of_the_end(model, tokenizer):
    engine = Engine(Batch(model, widths=[2], room=512, longest_chunk=32), rows=2, max_queue=0)
    with serving(make_app(Language(NAME, engine, tokenizer, timeout=60))) as address, client(address) as opened:
        stream = opened.chat.completions.create(**LONG, n=2, stream=True)
        indices = {next(stream).choices[0].index for _ in range(8)}
        engine.close()
        with pytest.raises(openai.APIError, match="the server is shutting down: the answer has no end"):
            indices.update(chunk.choices[0].index for chunk in stream)
        assert indices == {0, 1}


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("chat/completions", "tools", [{"type": "function", "function": {"name": "f"}}]),
        ("chat/completions", "tool_choice", "required"),
        ("chat/completions", "functions", [{"name": "f"}]),
        ("chat/completions", "response_format", {"type": "json_object"}),
        ("chat/completions", "modalities", ["text", "audio"]),
        ("chat/completions", "echo", True),
        ("chat/completions", "best_of", 2),
        ("chat/completions", "suffix", "."),
        ("completions", "best_of", 2),
        ("completions", "suffix", "."),
        ("completions", "top_logprobs", 2),
        ("completions", "n", 129),
    ],
)
def test_what_is_not_supported_is_named(path, name, value, opened):
    prompt = {"messages": POEM} if path.startswith("chat") else {"prompt": "a"}
    address = str(opened.base_url).removesuffix("/v1/")
    status, _, body = send(address, "POST", f"/v1/{path}", json.dumps({"model": NAME, **prompt, name: value}))
    assert (status, body["error"]["param"]) == (400, name)
    assert name in body["error"]["message"]
