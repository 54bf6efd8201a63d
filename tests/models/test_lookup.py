"""Guesses of the next tokens: what is guessed, and that no text changes by it."""

import json
import re

import jax
import numpy as np
import pytest

from models import gguf, llama, lora
from models.decoding.chooser import Choice
from models.decoding.generator import Generator
from models.decoding.lookup import InexactRows, Lookup
from models.decoding.reader import Reader
from models.decoding.sampling import Sampling, Steps
from models.generate.__main__ import main
from models.parallel import tensor_parallel

from . import families
from .test_generator import interrupted, tokens_of
from .tiny import write_tiny


PROMPT = tokens_of(0, 40)
SAMPLINGS = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=1.0),
    "penalty": Sampling(repetition_penalty=1.5),
    "all": Sampling(temperature=0.9, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.3),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny(path, other="Q4_1", context=300)
    return llama.load(gguf.open_model(path))


class Oracle(Lookup):
    """Guesses from a text that is known. In turns no guess is wrong, the first, the second, or nothing is guessed."""

    def __init__(self, text):
        super().__init__(2)
        self.text, self.sizes = text, []

    def start(self, tokens):
        self.place, self.turn = 1, 0

    def add(self, token):
        assert token == self.text[self.place]
        self.place += 1

    def guess(self):
        guesses, turn = [*self.text[self.place : self.place + 2], 0, 0][:2], self.turn % 4
        self.turn += 1
        if turn == 3:
            return []
        return [(token + (turn == i + 1)) % 64 for i, token in enumerate(guesses)]

    def took(self, seconds, *, guessed):
        assert seconds > 0
        self.sizes.append(guessed)


def taught(text):
    """Return a lookup that has seen tokens come one by one, and what it guessed at the end."""
    lookup, guesses = Lookup(2), []
    lookup.start([])
    for token in text:
        lookup.add(token)
        guesses = lookup.guess()
    return lookup, guesses


def test_what_came_there_before_is_guessed():
    assert taught([1, 2, 3, 4, 5, 1, 2, 3])[1] == []  # the first guess is compared with what comes
    assert taught([1, 2, 3, 4, 5, 1, 2, 3, 4, 5])[1] == [1, 2]
    assert taught([1, 2, 3, 4, 5] * 2 + [1, 2, 3, 7, 7] + [1, 2, 3])[1] == [7, 7]  # the last place counts
    assert taught([1] * 9)[1] == [1, 1]  # beyond the end a text goes on as it did
    assert taught([1, 2, 3, 4, 5, 1, 2])[1] == []
    assert taught([])[1] == taught([1])[1] == []


def test_nothing_is_guessed_where_it_does_not_pay():
    wrong = [x for i in range(20) for x in (1, 2, 3, 10 + i)]
    assert taught([*wrong, 1, 2, 3])[1] == []
    lookup, guesses = taught([1, 2, 3, 4, 5] * 6)
    assert guesses == [1, 2]
    lookup.took(1.0, guessed=False)
    for _ in range(20):
        lookup.took(3.0, guessed=True)  # as long as to make the tokens that two right guesses save
    assert lookup.guess() == []
    for _ in range(20):
        lookup.took(1.0, guessed=False)
    assert lookup.guess() == [1, 2]  # it is tried again


def test_guesses_end_when_they_become_wrong_and_come_back():
    lookup = taught([1, 2, 3, 4, 5] * 6)[0]
    tried = 0
    for i in range(40):
        for token in (1, 2, 3):
            lookup.add(token)
        tried += bool(lookup.guess())
        lookup.add(100 + i)
    assert 3 < tried < 20
    for _ in range(60):
        lookup.add(9)
        lookup.guess()
    assert lookup.guess() == [9, 9]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_text_is_the_same_with_guesses(name, tiny):
    generator = Generator(tiny, room=256, sampling=SAMPLINGS[name], seed=3, lookup=True)
    text = list(Generator(tiny, room=256, sampling=SAMPLINGS[name], seed=3).generate(PROMPT, max_tokens=100))
    oracle = generator._lookup = Oracle(text)
    for max_tokens in (100, 60, 7, 6, 5, 4, 3, 2, 1):
        assert list(generator.generate(PROMPT, max_tokens=max_tokens)) == text[:max_tokens]
        assert generator.reader.tokens == [*PROMPT, *text][: len(PROMPT) + max_tokens - 1]
        speed = generator.speed
        assert speed.decoded_tokens == max_tokens - 1
        assert speed.accepted_tokens <= speed.guessed_tokens
        if max_tokens == 100:
            # 2 are right, none, 1, and there are none: 7 tokens by 4 programs.
            assert oracle.sizes[:-1] == ([True, True, True, False] * 25)[: len(oracle.sizes) - 1]
            assert len(oracle.sizes) == pytest.approx(99 * 4 / 7, abs=2)
            assert str(speed).endswith(f", {speed.accepted_tokens} of {speed.guessed_tokens} guesses right")


def test_at_the_end_of_the_room_and_in_a_conversation(tiny):
    plain, generator = Generator(tiny, room=256), Generator(tiny, room=256, lookup=True)
    prompt = tokens_of(1, 200)
    text = list(plain.generate(prompt, max_tokens=1000))
    generator._lookup = Oracle(text)
    assert list(generator.generate(prompt, max_tokens=1000)) == text
    assert len(text) == 256 - 200
    longer = [*prompt, *text[:20], *tokens_of(2, 9)]
    text = list(plain.generate(longer, max_tokens=20))
    generator._lookup = Oracle(text)
    assert list(generator.generate(longer, max_tokens=20)) == text
    assert generator.speed.kept_tokens == 220


def test_who_stops_and_who_interrupts(tiny, monkeypatch):
    generator = Generator(tiny, room=256, lookup=True)
    text = list(generator.generate(PROMPT, max_tokens=60))
    generator._lookup = Oracle(text)
    answers = iter([False, False, True])
    assert list(generator.generate(PROMPT, max_tokens=60, stopped=lambda: next(answers))) == text[:4]
    monkeypatch.setitem(generator.reader._step_programs, (3, Steps()), interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(generator.generate(PROMPT, max_tokens=60))
    monkeypatch.undo()
    assert list(generator.generate(PROMPT, max_tokens=60)) == text
    assert generator.speed.kept_tokens == 0


def test_several_devices(tiny, tmp_path):
    write_tiny(tmp_path / "tiny.gguf", other="Q8_0", hidden=128, context=300)
    file = gguf.open_model(tmp_path / "tiny.gguf")
    sampling = SAMPLINGS["all"]
    split = tensor_parallel.load(file, tensor_parallel.mesh_of(jax.devices()[:2]))
    text = list(Generator(split, room=256, sampling=sampling).generate(PROMPT, max_tokens=40))
    generator = Generator(split, room=256, sampling=sampling, lookup=True)
    generator._lookup = Oracle(text)
    assert list(generator.generate(PROMPT, max_tokens=40)) == text
    assert generator.speed.accepted_tokens > 10


@pytest.mark.parametrize(
    ("encoding", "dtype", "activations"),
    [
        *((encoding, "float32", "exact") for encoding in ("Q4_0", "Q8_0", "Q4_K")),
        ("Q4_1", "float32", "int8"),
        ("Q4_1", "bfloat16", "exact"),
        ("F32", "bfloat16", "exact"),
    ],
)
def test_a_step_of_several_tokens_has_the_bits_of_steps_of_one(encoding, dtype, activations, tmp_path):
    write_tiny(tmp_path / "tiny.gguf", other=encoding, width=256, context=300)
    model = llama.load(gguf.open_model(tmp_path / "tiny.gguf"), dtype=dtype, activations=activations)
    reader, choice, tokens = Reader(model, 300), Choice(), tokens_of(4, 129)
    assert reader.is_exact(choice)
    for chunk in reader.chunks(tokens[:126]):
        reader.read(chunk)
    # The kernel of attention joins parts of 128 keys.
    _, together = reader._step(tokens[126:], 126, choice)
    alone = [reader._step([token], 126 + i, choice)[1] for i, token in enumerate(tokens[126:])]
    np.testing.assert_array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_biases_and_norms_of_heads(family, tmp_path):
    settings = families.settings_of(family)
    path = families.write_gguf(tmp_path / "model.gguf", settings, families.random_weights(settings), encoding="Q8_0")
    assert Reader(llama.load(gguf.open_model(path)), 128).is_exact(Choice())


def test_adapters(tiny):
    adapters = lora.init(tiny.config, rank=3, scale=1.5, key=jax.random.key(0))
    adapters = jax.tree.map(lambda x: 0.1 * jax.random.normal(jax.random.key(1), x.shape), adapters)
    adapted = lora.attach(tiny, adapters)
    text = list(Generator(adapted, room=256).generate(PROMPT, max_tokens=30))
    assert text != list(Generator(tiny, room=256).generate(PROMPT, max_tokens=30))
    generator = Generator(adapted, room=256, lookup=True)
    generator._lookup = Oracle(text)
    assert list(generator.generate(PROMPT, max_tokens=30)) == text


def test_nothing_is_guessed_if_it_might_change_a_text(tmp_path, capsys):
    path = tmp_path / "f32.gguf"
    write_tiny(path, speaks=True, context=512)
    with pytest.raises(InexactRows, match=r"expected a model that gives several tokens the very logits that each gets"):
        Generator(llama.load(gguf.open_model(path)), room=64, lookup=True)
    assert main(["hello", "--weights", str(path), "--lookup"]) == 2
    error = (
        r"generate: error: --lookup: expected a model that gives .* Use bf16 or quantised weights, or guess nothing.\n"
    )
    assert re.fullmatch(error, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "x.txt"], "expected --lookup with a prompt or --chat; got it with --prompts"),
        (
            ["hi", "--processes", "2", "--coordinator", "localhost:1"],
            "expected one process for --lookup; got 2",
        ),
    ],
)
def test_where_the_option_is_refused(options, message, capsys):
    assert main([*options, "--lookup"]) == 2
    assert capsys.readouterr().err == f"generate: error: {message}\n"


def test_the_language_model_repeats_a_text(capsys, monkeypatch):
    monkeypatch.setattr(Lookup, "took", lambda self, seconds, guessed: None)  # tests have no processor for themselves
    sentence = "The lighthouse was built in 1874, after three ships were lost on the reef in a single winter."
    records = []
    for options in ([], ["--lookup"]):
        assert main([f"Repeat this text exactly: {sentence}", "--max-tokens", "48", "--json", *options]) == 0
        records.append(json.loads(capsys.readouterr().out))
    plain, guessed = records
    assert plain["guessed_tokens"] == plain["accepted_tokens"] == 0
    assert guessed["text"] == plain["text"]
    assert "three ships were lost" in plain["text"]
    assert guessed["decoded_tokens"] == plain["decoded_tokens"]
    assert guessed["guessed_tokens"] >= guessed["accepted_tokens"] > 5
