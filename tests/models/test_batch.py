"""Files of prompts: `python -m models.generate --prompts FILE`."""

import json
import re

import jax
import numpy as np
import pytest

from models._program import UsageError
from models.answer import Answer
from models.batch import Batch
from models.chooser import Chooser
from models.generate import main
from models.generator import Generator
from models.prompts import read_prompts
from models.sampling import Sampling


SAID = [
    "What is the capital of France?",
    "Write a poem about the sea.",
    "What is 2 + 2?",
    "Repeat after me: " + "the sea, the sea, " * 30,
    "Say hello.",
]


def test_each_row_says_what_it_says_alone(model, tokenizer):
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in SAID]
    answers = [Answer(tokenizer, ["4"]) for _ in prompts]
    batch = Batch(model, rows=3, room=256)
    ended = list(batch.answer(prompts, answers, max_tokens=16))
    assert sorted(ended) == list(range(5))
    generator = Generator(model, room=256)
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = Answer(tokenizer, ["4"])
        alone.take(generator.generate(prompt, max_tokens=16), str, max_tokens=16)
        assert answer.record() == alone.record()
    assert {answer.finish for answer in answers} == {"stop_token", "max_tokens", "stop_string"}
    assert batch.speed.decoded_tokens == sum(answer.num_tokens - 1 for answer in answers)
    # What the prompts begin with is read once.
    assert batch.speed.kept_tokens + batch.speed.prompt_tokens == sum(map(len, prompts))
    assert batch.speed.kept_tokens > 4 * 20


def test_each_row_draws_what_it_draws_alone():
    sampling = Sampling(temperature=1.0, top_k=9, repetition_penalty=1.5)
    logits = jax.random.normal(jax.random.key(0), (6, 3, 40))
    together = Chooser(3, 40, sampling, seed=7)
    apart = [Chooser(1, 40, sampling, seed=7) for _ in range(3)]
    start = np.asarray([5, 80, 11], np.int32)
    for row in range(3):
        together.start(row, [3, row])
        apart[row].start(0, [3, row])
    for step in range(6):
        positions = start + np.int32(step)
        alone = [apart[i].choose(logits[step, i : i + 1], positions[i : i + 1])[0] for i in range(3)]
        np.testing.assert_array_equal(together.choose(logits[step], positions), alone)
    together.start(0, [3, 0])  # another text, which has nothing of the one before
    apart[0] = Chooser(1, 40, sampling, seed=7)
    apart[0].start(0, [3, 0])
    alone = apart[0].choose(logits[0, :1], start[:1])
    assert together.choose(logits[0], start)[0] == alone[0]


def test_no_cache_is_copied(model):
    batch = Batch(model, rows=2, room=256)
    for program in (batch._next, batch._put_row):
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 100_000  # one layer's cache has 400,000
        assert memory.alias_size_in_bytes >= 2 * 60 * 256 * 3 * 64 * 4


def test_the_room_ends(model, tokenizer):
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Count from one to a hundred." + " Please." * 90}])
    answer = Answer(tokenizer)
    assert list(Batch(model, rows=1, room=256).answer([prompt], [answer], max_tokens=200)) == [0]
    assert (answer.finish, len(prompt) + answer.num_tokens) == ("context", 256)


def test_lines_in_their_order(tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text("Count from one to ten.\n\n  What is the capital of France?\n")
    assert main(["--prompts", str(path), "--rows", "2", "--max-tokens", "12"]) == 0
    written = capsys.readouterr()
    expected = (
        r"> Count from one to ten\.\n.+\n\n> What is the capital of France\?\nThe capital of France is Paris\.\n\n"
    )
    assert re.fullmatch(expected, written.out, re.DOTALL)
    assert re.search(r"decode: \d+ tokens, [\d.]+ tokens per second\n$", written.err)


def test_objects(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    records = [{"prompt": "What is the capital of France?", "system": "Answer."}, {"prompt": "Say hello."}]
    path.write_text("\n".join(map(json.dumps, records)))
    assert main(["--prompts", str(path), "--json", "--max-tokens", "8", "--stop", "Paris"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first.items() >= {**records[0], "finish": "stop_string", "stop_string": "Paris"}.items()
    assert second.keys() == {"prompt", "text", "finish", "stop_string", "answer_tokens"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", b"\n \n", r"a.txt: expected at least one prompt; got empty lines alone"),
        ("a.txt", b"\xff\xff", r"a.txt: expected a text file in UTF-8; got: .*invalid start byte"),
        ("a.jsonl", b'\n{"prompt": ', r"a.jsonl:2: expected a JSON object; got Expecting value.*"),
        ("a.jsonl", b'{"text": "hi"}', r'a.jsonl:1: expected an object with a "prompt" and.*; got {"text": "hi"}'),
        ("a.jsonl", b'{"prompt": 3}', r'a.jsonl:1: expected an object with .*, both text; got {"prompt": 3}'),
        ("a.jsonl", b'["hi"]', r'a.jsonl:1: expected an object with .*; got \["hi"\]'),
        (
            "a.txt",
            b"hi\n" + b"word " * 9000,
            r"a.txt:2: expected a prompt of less than 8192 tokens, .*; got 90\d\d. Sho.*",
        ),
    ],
)
def test_files_that_are_wrong(name, text, message, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(text)
    assert main(["--prompts", str(path)]) == 2
    assert re.fullmatch(rf"generate: error: {re.escape(str(tmp_path))}/{message}\n", capsys.readouterr().err)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"none.txt: expected a text file in UTF-8; got: No such file or directory"):
        read_prompts(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--rows", "2"], "expected --rows with --prompts; got it without"),
        (["--prompts", "a.txt", "--rows", "0"], "expected --rows of 1 or more; got 0"),
        (["--prompts", "a.txt", "--chat"], "expected one of a prompt, --chat and --prompts; got --chat and --prompts"),
    ],
)
def test_wrong_options(arguments, message, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"generate: error: {message}\n"
