"""Prompts in chunks, into a cache that is not empty, and what a generator does with them."""

import ctypes
import gc
import re
from itertools import chain, takewhile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import gguf, llama
from models.decoding.answer import Answer
from models.decoding.batch import Batch, Request
from models.decoding.chooser import Choice
from models.decoding.generator import Generator
from models.decoding.reader import Reader
from models.decoding.sampling import Sampling, Steps
from models.model_files import open_files

from ..stress.conftest import resident
from .tiny import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny(path, context=1000)
    return llama.load(gguf.open_model(path))


@pytest.fixture(scope="module")
def plain(model):
    """The logits after a prompt, which is read as a whole into a cache of its own."""

    @jax.jit
    def logits(tokens, count):
        x, _ = model(tokens, model.init_cache(len(tokens)))
        return model.logits(jax.lax.dynamic_slice_in_dim(x, count - 1, 1))[0]

    return lambda tokens: logits(jnp.asarray(np.resize(tokens, 1000), jnp.int32), len(tokens))


@pytest.fixture(scope="module")
def reader(model):
    """One for all tests, as it has its programs: each begins with what another left in the cache."""
    return Reader(model, 1000)


def tokens_of(seed, count):
    return np.random.default_rng(seed).integers(0, 64, count).tolist()


def read(reader, tokens):
    """The logits after the last token, and how many were read."""
    reader.forget(tokens)
    chunks = reader.chunks(tokens[len(reader.tokens) :])
    return [reader.read(chunk) for chunk in chunks][-1][0], sum(map(len, chunks))


def test_chunks_are_of_few_lengths(reader):
    reader.forget([0])
    assert [len(part) for part in reader.chunks([0] * 600)] == [512, 88]
    assert [len(part) for part in reader.chunks([0] * 513)] == [512, 1]
    assert [len(part) for part in reader.chunks([0] * 37)] == [37]


@pytest.mark.parametrize("count", [1, 37, 600, 999])
def test_a_prompt_in_chunks(count, reader, plain):
    tokens = tokens_of(count, count)
    logits, _ = read(reader, tokens)
    np.testing.assert_allclose(logits, plain(tokens), rtol=0, atol=1e-4)


def test_what_was_read_is_not_read_again(reader, plain):
    tokens = tokens_of(1, 700)
    counts = []
    for end in (50, 51, 300, 301, 700, 700):
        logits, count = read(reader, tokens[:end])
        np.testing.assert_allclose(logits, plain(tokens[:end]), rtol=0, atol=1e-4)
        counts.append(count)
    # Of a prompt that is in the cache the last token is read: its logits are needed.
    assert counts == [50, 1, 249, 1, 399, 1]


def test_a_prompt_that_parts_from_the_one_before(reader, plain):
    first, second = tokens_of(2, 400), tokens_of(3, 100)
    read(reader, first)
    tokens = [*first[:90], (first[90] + 1) % 64, *second]
    logits, count = read(reader, tokens)
    assert count == 101
    assert reader.tokens == tokens
    np.testing.assert_allclose(logits, plain(tokens), rtol=0, atol=1e-4)


def test_padding_at_the_end_of_the_cache_overwrites_nothing(reader, plain):
    tokens = tokens_of(4, 999)
    read(reader, tokens[:850])
    assert [len(part) for part in reader.chunks(tokens[850:])] == [128, 21]  # 149 tokens, padded to 256, have no room
    logits, _ = read(reader, tokens)
    np.testing.assert_allclose(logits, plain(tokens), rtol=0, atol=1e-4)
    assert {32, 128} <= set(reader._programs) <= {1, 32, 64, 128, 256, 512}


def test_programs_of_a_context_that_is_shorter_than_a_chunk(tmp_path):
    write_tiny(tmp_path / "tiny.gguf", context=40)
    reader = Reader(llama.load(gguf.open_model(tmp_path / "tiny.gguf")), 2000)
    for compile_program in reader.programs():
        compile_program()
    assert reader._programs.keys() == {1, 32, 64}
    read(reader, tokens_of(11, 39))
    assert reader._programs.keys() == {1, 32, 64}


def test_a_generator_goes_on_where_it_was(model):
    first, second = tokens_of(5, 40), tokens_of(6, 20)
    generator = Generator(model, room=200)
    answer = list(generator.generate(first, max_tokens=10))
    history = [*first, *answer, *second]
    longer = list(generator.generate(history, max_tokens=10))
    assert (generator.speed.kept_tokens, generator.speed.prompt_tokens) == (49, 21)  # the last token had not been read
    assert longer == list(Generator(model, room=200).generate(history, max_tokens=10))
    assert list(generator.generate(history, max_tokens=10)) == longer
    assert (generator.speed.kept_tokens, generator.speed.prompt_tokens, generator.speed.decoded_tokens) == (69, 1, 9)
    assert re.fullmatch(
        r"prompt: 1 tokens after 69 kept ones, [\d.]+ tokens per second; decode: 9 tokens, [\d.]+ tokens per second",
        str(generator.speed),
    )


def test_an_interrupted_program_takes_the_cache_with_it(model, monkeypatch):
    tokens = tokens_of(7, 40)
    generator = Generator(model, room=100)
    expected = list(generator.generate(tokens, max_tokens=5))
    monkeypatch.setitem(generator.reader._step_programs, (1, Steps()), interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(generator.generate(tokens, max_tokens=5))
    monkeypatch.undo()
    assert list(generator.generate(tokens, max_tokens=5)) == expected
    assert generator.speed.kept_tokens == 0


def interrupted(*arguments):
    raise KeyboardInterrupt


def test_who_stops_is_asked_before_each_program(model):
    generator = Generator(model, room=900)
    answers = iter([False, True])
    assert list(generator.generate(tokens_of(8, 600), max_tokens=5, stopped=lambda: next(answers))) == []
    assert generator.speed.prompt_tokens == 512
    answers = iter([False, False, False, True])
    assert len(list(generator.generate(tokens_of(8, 600), max_tokens=9, stopped=lambda: next(answers)))) == 3
    assert generator.speed.kept_tokens == 512


def test_a_repetition_penalty_sees_prompt_and_answer(model, plain):
    tokens = tokens_of(9, 12)
    sampling = Sampling(repetition_penalty=1.7)
    answer = list(Generator(model, room=100, sampling=sampling).generate(tokens, max_tokens=12))
    for end, token in enumerate(answer):
        before = tokens + answer[:end]
        logits = np.array(plain(before))
        seen = sorted(set(before))
        logits[seen] = np.where(logits[seen] < 0, logits[seen] * 1.7, logits[seen] / 1.7)
        assert token == np.argmax(logits)
    assert answer != list(Generator(model, room=100).generate(tokens, max_tokens=12))


@pytest.mark.parametrize("length", [0, 1000])
def test_prompts_of_a_wrong_length(length, model):
    with pytest.raises(ValueError, match=f"expected a prompt of 1 to 999 tokens; got {length} tokens"):
        Generator(model, room=2000).generate([1] * length, max_tokens=1)


def test_the_room_is_what_was_asked_for(model):
    """The cache has more, so that few lengths of it are compiled."""
    generator = Generator(model, room=100)
    assert generator.room == 100
    assert len(list(generator.generate([1] * 93, max_tokens=50))) == 7
    with pytest.raises(ValueError, match="expected a prompt of 1 to 99 tokens; got 100 tokens"):
        generator.generate([1] * 100, max_tokens=1)


def test_the_end_of_the_context(model):
    generator = Generator(model, room=2000)
    assert generator.room == 1000
    assert len(list(generator.generate(tokens_of(10, 998), max_tokens=100))) == 2


def used():
    """Bytes of memory without what was freed: room that other tests left would hide growth, and a text that grows leaves some."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
@pytest.mark.parametrize("kind", ["drawn", "guessed", "batch"])
def test_memory_does_not_grow(kind, cache_dtype, tmp_path):
    """A generator's, with prompt lookup too, and a batch's."""
    write_tiny(tmp_path / "tiny.gguf", other="Q4_1", hidden=128, context=2560, speaks=True)
    file, tokenizer = open_files(tmp_path / "tiny.gguf")
    model = llama.load(file, cache_dtype=cache_dtype, packed=True)  # weights with which guesses are exact
    sampling = Sampling() if kind == "guessed" else Sampling(temperature=0.2)  # which draws no end
    generator = Generator(model, room=2560, sampling=sampling, lookup=kind == "guessed")
    steps = generator.generate([1], max_tokens=2500)
    if kind == "batch":
        batch = Batch(model, widths=[2], room=2560)
        for seed in range(2):
            batch.add(Request([1], Answer(tokenizer), 2500, Choice(sampling, seed)))
        steps = takewhile(len, chain((batch.read() for _ in range(2)), iter(batch.decode, None)))
    for _ in range(400):  # programs, and pools of memory
        next(steps)
    before = used()
    assert sum(1 for _ in steps) >= 2090
    assert used() - before < 2 << 20  # a kilobyte for each token
    assert (generator.speed.guessed_tokens > 0) == (kind == "guessed")
