"""Log-probabilities of tokens: those of a plain Llama in JAX, in OpenAI's forms."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from benchmarks import plain_llama
from models import gguf
from models.decoding.answer import Answer
from models.decoding.batch import Batch, Request
from models.decoding.chooser import Choice
from models.decoding.sampling import Sampling
from models.decoding.scores import Score, Scorer
from models.parallel import tensor_parallel
from models.serve.app import make_app
from models.serve.engine import Engine
from models.serve.language import Language
from models.serve.logprobs import form_of

from .test_serve import client, serving
from .tiny import write_tiny


NAME = "small"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
END = 2  # `<|im_end|>`
CHAT = {"model": NAME, "messages": FRANCE, "logprobs": True}
# Options that change what is chosen, and not what the model says of it.
DRAWN = {"temperature": 1.7, "top_p": 0.95, "seed": 3, "frequency_penalty": 1.5, "logit_bias": {"28": -100}}


@pytest.fixture(scope="module")
def batch(model):
    return Batch(model, widths=[1, 3], room=256, longest_chunk=32)


@pytest.fixture(scope="module")
def opened(batch, tokenizer):
    engine = Engine(batch, rows=3, max_queue=8)
    with serving(make_app(Language(NAME, engine, tokenizer, timeout=60))) as address, client(address) as opened:
        yield opened
    engine.close()


@pytest.fixture(scope="module")
def numbers(tokenizer):
    """The tokens that are text, by their bytes."""
    return {tokenizer.piece(i): i for i in range(tokenizer.vocab_size) if tokenizer.control_text(i) is None}


@pytest.fixture(scope="module")
def rated(file):
    """Return what plain JAX says at each place of an answer: the log-probabilities of all tokens."""
    plain = plain_llama.load(gguf.default_path())

    def rate(prompt, answer):
        tokens = np.zeros(96, np.int32)  # of one length, so that there is one program; what comes later changes nothing
        tokens[: len(prompt) + len(answer)] = [*prompt, *answer]
        logits = plain_llama.logits(plain, file.config, jnp.asarray(tokens))
        return np.asarray(jax.nn.log_softmax(logits))[len(prompt) - 1 :][: len(answer)]

    return rate


@pytest.mark.parametrize("options", [{"temperature": 0}, DRAWN])
def test_of_a_chat(options, opened, tokenizer, numbers, rated):
    response = opened.chat.completions.create(**CHAT, **options, n=3, max_tokens=12, top_logprobs=5)
    prompt = tokenizer.encode_chat(FRANCE)
    assert len(response.choices) == 3
    for choice in response.choices:
        content = choice.logprobs.content
        assert b"".join(bytes(token.bytes) for token in content) == choice.message.content.encode()
        answer = [numbers[bytes(token.bytes)] for token in content]
        assert len(content) >= 5
        assert [token.token for token in content] == [tokenizer.decode([number]) for number in answer]
        for token, number, place in zip(content, answer, rated(prompt, answer), strict=True):
            assert math.isclose(token.logprob, place[number], abs_tol=2e-3)
            top = [entry.logprob for entry in token.top_logprobs]
            np.testing.assert_allclose(top, np.sort(place)[: -len(top) - 1 : -1], atol=2e-3)
            for entry in token.top_logprobs:
                likely = END if entry.bytes is None else numbers[bytes(entry.bytes)]
                assert math.isclose(entry.logprob, place[likely], abs_tol=2e-3)


def test_ends_are_among_the_alternatives_and_not_in_the_answer(opened, tokenizer):
    """As control tokens, which have names and no bytes."""
    assert tokenizer.encode("<|im_end|>") == [END]
    options = {**CHAT, "temperature": 0, "top_logprobs": 20, "max_tokens": 24}
    response = opened.chat.completions.create(**options)
    (choice,) = response.choices
    assert choice.finish_reason == "stop"
    content = choice.logprobs.content
    assert len(content) == response.usage.completion_tokens - 1
    assert {len(token.top_logprobs) for token in content} == {20}
    assert choice.logprobs.refusal is None
    (longer,) = opened.chat.completions.create(**options, logit_bias={END: -100}).choices
    likeliest = longer.logprobs.content[len(content)].top_logprobs[0]  # which was not to be chosen
    assert (likeliest.token, likeliest.bytes) == ("<|im_end|>", None)
    assert likeliest.logprob > longer.logprobs.content[len(content)].logprob > -100
    (bare,) = opened.chat.completions.create(**CHAT, temperature=0, max_tokens=2).choices
    assert [token.top_logprobs for token in bare.logprobs.content] == [[], []]
    (bare,) = opened.chat.completions.create(model=NAME, messages=FRANCE, max_tokens=2).choices
    assert bare.logprobs is None


@pytest.mark.parametrize("count", [0, 3, 5])
def test_of_a_completion(count, opened, tokenizer, numbers, rated):
    text = "The capital of France is"
    options = {**DRAWN, "model": NAME, "prompt": text, "max_tokens": 10, "logprobs": count}
    (choice,) = opened.completions.create(**options).choices
    tokens, logprobs, alternatives = (
        choice.logprobs.tokens,
        choice.logprobs.token_logprobs,
        choice.logprobs.top_logprobs,
    )
    assert "".join(tokens) == choice.text
    assert choice.logprobs.text_offset == [len("".join(tokens[:i])) for i in range(len(tokens))]
    answer = [numbers[token.encode()] for token in tokens]
    places = rated(tokenizer.encode(text), answer)
    np.testing.assert_allclose(logprobs, places[range(len(answer)), answer], atol=2e-3)
    for token, logprob, top, place in zip(tokens, logprobs, alternatives, places, strict=True):
        assert top[token] == logprob
        rest = sorted(value for name, value in top.items() if name != token)
        likeliest = np.sort(place)[::-1][:count]
        is_likely = count > 0 and logprob > likeliest[-1] - 2e-3
        assert len(top) == (count if is_likely else count + 1)
        if not is_likely:
            np.testing.assert_allclose(rest[::-1], likeliest, atol=2e-3)


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
@pytest.mark.parametrize("size", [1, 2, 33, 70])
def test_of_a_prompt_that_is_echoed(size, max_tokens, opened, tokenizer, rated):
    """As programs that compare models on given texts ask for them. A prompt that was read before is read again."""
    prompt = (5 * tokenizer.encode("The capital of France is Paris, and the capital of Italy is Rome."))[:size]
    options = {"model": NAME, "prompt": prompt, "temperature": 0, "echo": True, "max_tokens": max_tokens, "logprobs": 2}
    for _ in range(2):
        response = opened.completions.create(**options)
        (choice,) = response.choices
        scores: Any = choice.logprobs
        assert response.usage.completion_tokens == max_tokens
        assert choice.finish_reason == "length"
        assert "".join(scores.tokens) == choice.text
        assert scores.text_offset == [len("".join(scores.tokens[:i])) for i in range(size + max_tokens)]
        assert scores.token_logprobs[0] is scores.top_logprobs[0] is None
        tokens = [*prompt, *tokenizer.encode("".join(scores.tokens[size:]))]
        assert [tokenizer.decode([token]) for token in tokens] == scores.tokens
        places = rated(tokens[:1], tokens[1:])
        np.testing.assert_allclose(scores.token_logprobs[1:], places[range(len(places)), tokens[1:]], atol=2e-3)
        for token, logprob, top, place in zip(
            scores.tokens[1:], scores.token_logprobs[1:], scores.top_logprobs[1:], places, strict=True
        ):
            assert top[token] == logprob
            np.testing.assert_allclose(sorted(top.values())[:-3:-1], np.sort(place)[:-3:-1], atol=2e-3)


def test_an_echo_is_scored_in_a_stream_and_for_each_choice(opened, batch):
    options = {"model": NAME, "prompt": "One, two, é👍", "temperature": 0, "echo": True, "max_tokens": 4, "logprobs": 0}
    (whole,) = opened.completions.create(**options).choices
    assert whole.logprobs.token_logprobs.count(None) == 1
    for choice in opened.completions.create(**options, n=2).choices:
        assert choice.logprobs.tokens == whole.logprobs.tokens
        assert choice.logprobs.text_offset == whole.logprobs.text_offset
    text, tokens, offsets = "", [], []
    for chunk in opened.completions.create(**options, stream=True):
        text += chunk.choices[0].text
        if chunk.choices[0].logprobs:
            tokens += chunk.choices[0].logprobs.tokens
            offsets += chunk.choices[0].logprobs.text_offset
    assert (text, tokens, offsets) == (whole.text, whole.logprobs.tokens, whole.logprobs.text_offset)


def test_the_end_of_a_completion_has_a_score(opened, tokenizer):
    """So what was asked to go on for a token has one, whichever it is. A chat's end has none."""
    (choice,) = opened.completions.create(
        model=NAME, prompt="Paris", max_tokens=1, logprobs=1, echo=True, logit_bias={END: 100}
    ).choices
    assert choice.text == "Paris"
    assert choice.finish_reason == "stop"
    assert choice.logprobs.tokens[-1] == "<|im_end|>"
    assert len(choice.logprobs.tokens) == len(tokenizer.encode("Paris")) + 1
    assert choice.logprobs.text_offset[-1] == len("Paris")
    (choice,) = opened.chat.completions.create(**CHAT, max_tokens=1, logit_bias={END: 100}).choices
    assert choice.logprobs.content == []


@pytest.mark.parametrize("stop", [None, ["capital of", "never"], ["is Par"]])
def test_streams_have_those_of_their_text(stop, opened):
    """Also where a string that might end the answer holds tokens back: they come later, or not at all."""
    options = {**CHAT, "temperature": 0, "top_logprobs": 2, "stop": stop, "max_tokens": 12}
    (whole,) = opened.chat.completions.create(**options).choices
    content = whole.logprobs.content
    text = "".join(token.token for token in content)
    assert text.startswith(whole.message.content)
    assert not "".join(token.token for token in content[:-1]).startswith(whole.message.content)
    chunks = [chunk.choices[0] for chunk in opened.chat.completions.create(**options, stream=True)]
    streamed = [token for chunk in chunks if chunk.logprobs is not None for token in chunk.logprobs.content]
    assert [token.token for token in streamed] == [token.token for token in content]
    # Not bit by bit: they may have been made beside other rows.
    np.testing.assert_allclose([token.logprob for token in streamed], [token.logprob for token in content], atol=1e-3)
    assert {len(token.top_logprobs) for token in streamed} == {2}
    said = scored = ""
    for chunk in chunks:
        said += chunk.delta.content or ""
        scored += "".join(token.token for token in chunk.logprobs.content) if chunk.logprobs else ""
        assert scored.startswith(said)
    options = {
        "model": NAME,
        "prompt": "The capital of",
        "temperature": 0,
        "logprobs": 2,
        "stop": stop,
        "max_tokens": 12,
    }
    (whole,) = opened.completions.create(**options).choices
    parts = [chunk.choices[0].logprobs for chunk in opened.completions.create(**options, stream=True)]
    streamed = {
        name: [entry for part in parts if part is not None for entry in getattr(part, name)]
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs")
    }
    assert streamed["tokens"] == whole.logprobs.tokens
    assert streamed["text_offset"] == whole.logprobs.text_offset
    np.testing.assert_allclose(streamed["token_logprobs"], whole.logprobs.token_logprobs, atol=1e-3)
    assert len(streamed["top_logprobs"]) == len(whole.logprobs.tokens)


def test_parts_of_characters(tokenizer):
    """They come together, once the character is whole; each has its bytes."""
    tokens = tokenizer.encode("é👍!")
    thumb = tokens[1:-1]
    assert len(thumb) > 1
    answer = Answer(tokenizer)
    popped = []
    for token in tokens:
        answer.push(token, Score(token, -1.0, [(token, -1.0)]))
        popped.append([(start, score.token) for start, score in answer.pop_scores()])
    assert popped == [[(0, tokens[0])], *[[]] * (len(thumb) - 1), [(1, token) for token in thumb], [(2, tokens[-1])]]
    scores = [(1, Score(token, -1.0, [(token, -1.0)])) for token in thumb]
    content = form_of(tokenizer, is_chat=True)(scores)["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "👍"
    names = form_of(tokenizer, is_chat=False)(scores)["tokens"]
    assert "".join(names) == "bytes:" + "bytes:".join(
        "".join(f"\\x{byte:02x}" for byte in tokenizer.piece(token)) for token in thumb
    )


@pytest.mark.parametrize("is_chat", [True, False])
def test_impossible_tokens_have_a_number(tokenizer, is_chat):
    """JSON has none for an infinity: OpenAI's for a very unlikely token takes its place."""
    first, second = tokenizer.encode("a b")[:2]
    scores = [(0, Score(first, -np.inf, [(second, -0.0), (first, -np.inf)])), (1, Score(second, np.nan, []))]
    text = json.dumps(form_of(tokenizer, is_chat=is_chat)(scores), allow_nan=False)
    assert text.count("-9999.0") == (3 if is_chat else 4)
    assert text.count("-0.0") == 1


def test_an_answer_that_ends_in_half_a_character_has_all_its_scores(tokenizer):
    part = tokenizer.encode("👍")[0]
    answer = Answer(tokenizer)
    answer.push(part, Score(part, -1.0, []))
    assert answer.pop_scores() == []
    assert answer.end("max_tokens") == "\ufffd"
    assert answer.pop_scores() == [(0, Score(part, -1.0, []))]
    assert answer.pop_scores() == []


def test_who_does_not_ask_for_them_pays_nothing(model, tokenizer, monkeypatch):
    """The program that rates tokens does not run, and is there before anyone asks."""
    batch = Batch(model, widths=[1, 2], room=256, longest_chunk=32)
    for compile_program in batch.programs():
        compile_program()
    prepare, rated, compiled = Scorer.prepare, [], []
    monkeypatch.setattr(Scorer, "prepare", lambda self, width: rated.append(width) or prepare(self, width))

    def listen(event, duration_secs, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    def answers(*counts):
        rated.clear()
        requests = [Request(tokenizer.encode("The sea"), Answer(tokenizer), 6, top_logprobs=count) for count in counts]
        for request in requests:
            batch.add(request)
        return sorted({request.answer.text for request in batch.run()})

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        plain = answers(None, None)
        assert rated == []
        assert answers(None, 4) == answers(0, 2) == plain
        assert set(rated) == {1, 2}
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


def test_a_small_vocabulary_has_no_more_alternatives_than_tokens():
    logits = np.log(np.asarray([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3]], np.float32))
    first, second = Scorer(3).scores(logits, [1, 1], [20, None])
    assert second is None
    assert first is not None
    assert first.logprob is not None
    np.testing.assert_allclose(
        [first.logprob, *(value for _, value in first.top)], np.log([0.2, 0.5, 0.3, 0.2]), rtol=1e-6
    )
    assert [token for token, _ in first.top] == [0, 2, 1]


def test_a_model_on_several_devices_has_none(tmp_path, tokenizer):
    write_tiny(tmp_path / "tiny.gguf")
    mesh = tensor_parallel.mesh_of(jax.devices()[:2])
    batch = Batch(tensor_parallel.load(gguf.open_model(tmp_path / "tiny.gguf"), mesh), widths=[1], room=64)
    with pytest.raises(ValueError, match="Batch: expected no top_logprobs for a model on several devices; got some"):
        batch.add(Request([1], Answer(tokenizer), 4, Choice(Sampling()), top_logprobs=0))


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("chat", {"top_logprobs": 2}, "top_logprobs: expected it with logprobs of true; got it without"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs: expected an integer from 0 to 20; got 21"),
        ("chat", {"logprobs": 1}, "logprobs: expected true or false; got 1"),
        ("text", {"logprobs": 6}, "logprobs: expected an integer from 0 to 5; got 6"),
        ("text", {"logprobs": True}, "logprobs: expected an integer from 0 to 5; got true"),
    ],
)
def test_what_is_refused(kind, fields, message, opened):
    create = opened.chat.completions.create if kind == "chat" else opened.completions.create
    prompt = {"messages": FRANCE} if kind == "chat" else {"prompt": "a"}
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        create(model=NAME, **prompt, extra_body=fields)
    assert caught.value.param == message.partition(":")[0]
