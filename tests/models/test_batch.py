"""Files of prompts: `python -m models.generate --prompts FILE`."""

import collections
import itertools
import json
import re

import jax
import numpy as np
import pytest

from models import llama
from models._program import UsageError
from models.decoding.answer import Answer
from models.decoding.batch import Batch, Request
from models.decoding.chooser import Choice, Chooser, choose_each, operands_of
from models.decoding.generator import Generator
from models.decoding.sampling import Sampling
from models.generate.__main__ import main
from models.generate.prompts import read_prompts


SAID = [
    "What is the capital of France?",
    "Write a poem about the sea.",
    "What is 2 + 2?",
    "Repeat after me: " + "the sea, the sea, " * 30,
    "Say hello.",
]


def ask(tokenizer, text, stop=(), **options):
    prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
    return Request(prompt, Answer(tokenizer, stop), **{"max_tokens": 16, **options})


@pytest.fixture(scope="module")
def said_alone(model, tokenizer):
    """The records of the answers that a generator makes."""
    generator, records = Generator(model, room=256), []
    for text in SAID:
        request = ask(tokenizer, text, ["4"])
        request.answer.take(generator.generate(request.prompt, max_tokens=16), str, max_tokens=16)
        records.append(request.answer.record())
    return records


def test_each_row_says_what_it_says_alone(model, tokenizer, said_alone):
    requests = [ask(tokenizer, text, ["4"]) for text in SAID]
    batch = Batch(model, widths=[3], room=256)
    for request in requests:
        batch.add(request)
    assert set(batch.run()) == set(requests)
    assert [request.answer.record() for request in requests] == said_alone
    assert {request.answer.finish for request in requests} == {"stop_token", "max_tokens", "stop_string"}
    assert batch.speed.decoded_tokens == sum(request.answer.num_tokens - 1 for request in requests)
    # What the prompts begin with is read once.
    assert batch.speed.kept_tokens + batch.speed.prompt_tokens == sum(len(request.prompt) for request in requests)
    assert batch.speed.kept_tokens > 4 * 20


def test_requests_come_and_go(model, tokenizer, said_alone, monkeypatch):
    """Rows are added and taken away, moved and cancelled, while a long prompt is read in parts."""
    monkeypatch.setattr("models.decoding.batch._PATIENCE", 2)
    batch = Batch(model, widths=[1, 2, 3], room=256, longest_chunk=32)
    requests = [ask(tokenizer, text, ["4"]) for text in SAID]
    texts, widths = collections.defaultdict(str), []

    def turn():
        for request, text in batch.read() + batch.decode():
            texts[request] += text
        widths.append(batch._caches.width)

    extra = [ask(tokenizer, text, max_tokens=90) for text in SAID]
    for request in (extra[1], requests[3], requests[1], extra[3]):
        batch.add(request)
    while not texts[requests[1]]:
        turn()
    batch.cancel(extra[1])  # which has a row
    turn()
    assert batch._reading is not None
    batch.cancel(extra[3])  # whose prompt is being read
    batch.add(extra[0])
    batch.cancel(extra[0])  # which waits
    while batch.is_busy:
        turn()
    for i in (0, 2, 4):
        batch.add(requests[i])
    batch.cancel(extra[2])  # which nobody knows
    while batch.is_busy:
        turn()
    assert [request.answer.record() for request in requests] == said_alone
    assert [texts[request] for request in requests] == [record["text"] for record in said_alone]
    # As many rows as there are requests, at once; with patience fewer again, and more when the next ones come.
    assert [width for width, _ in itertools.groupby(widths)][:6] == [0, 3, 2, 3, 2, 3]
    assert not extra[3].answer.num_tokens
    assert extra[1].answer.finish is None


def test_a_first_token_waits_for_no_row(model, tokenizer, said_alone):
    """Rows of caches are made, or moved, after it."""
    batch = Batch(model, widths=[1, 2], room=256)
    requests = [ask(tokenizer, text, ["4"]) for text in SAID[:3]]
    for request in requests:
        batch.add(request)
    assert batch.read() == [(requests[0], requests[0].answer.text)]
    assert requests[0].answer.num_tokens == 1
    assert batch._caches.width == 0
    batch.cancel(requests[0])  # which has none yet
    assert set(batch.run()) == set(requests[1:])
    assert [request.answer.record() for request in requests[1:]] == said_alone[1:3]
    assert batch._caches.width == 2


def test_each_text_draws_what_it_draws_alone():
    """Texts with other options in the same program change nothing."""
    every = [
        Sampling(temperature=1.0, top_k=9, repetition_penalty=1.5),
        Sampling(),
        Sampling(temperature=0.7, top_p=0.6),
        Sampling(temperature=2.0),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(repetition_penalty=3.0),
    ]
    rows = len(every)
    logits = jax.random.normal(jax.random.key(0), (6, rows, 40))
    together, apart, as_generated = ([Choice(sampling, 7 + i) for i, sampling in enumerate(every)] for _ in range(3))
    unseen, traced = np.zeros((rows, 40), bool), []

    @jax.jit
    def program(*operands):
        traced.append(operands)
        return choose_each(*operands)

    chooser, generators = Chooser(40), [Chooser(40, choice.steps) for choice in as_generated]
    start = np.asarray([5, 80, 11, 0, 3, 90], np.int32)
    for choices in (together, apart, as_generated):
        for row, choice in enumerate(choices):
            choice.start([3, row])
    drawn = []
    for step in range(6):
        positions = start + np.int32(step)
        alone = [chooser.choose(logits[step, [i]], positions[i], apart[i]) for i in range(rows)]
        generated = [generators[i].choose(logits[step, [i]], positions[i], as_generated[i]) for i in range(rows)]
        tokens = np.asarray(program(logits[step], positions, *operands_of(together, unseen)))
        for choice, token in zip(together, tokens.tolist(), strict=True):
            choice.add(token)
        drawn.append(tokens.tolist())
        assert drawn[-1] == alone == generated
    np.testing.assert_array_equal(np.asarray(drawn)[:, 1], logits[:, 1].argmax(-1))  # the one without options
    together[0].start([3, 0])  # another text, which has nothing of the one before
    anew = Choice(every[0], 7)
    anew.start([3, 0])
    without = program(logits[0], start, *operands_of([together[0], *[None] * (rows - 1)], unseen))
    assert without[0] == chooser.choose(logits[0, :1], start[0], anew) == drawn[0][0]
    assert len(traced) == 1  # whatever the options


def test_a_step_is_one_program_whatever_the_choices(model):
    """No options compile anything once the programs are there."""
    batch = Batch(model, widths=[2], room=256, longest_chunk=32)
    for compile_program in batch.programs():
        compile_program()
    compiled, caches = [], batch._caches
    caches.resize(2)
    every = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: compiled.append(1))
        for sampling in [*every, Sampling(repetition_penalty=1.2)]:
            tokens = caches.step(np.asarray([1, 2], np.int32), np.zeros(2, np.int32), [Choice(sampling), None])
            assert tokens.shape == (2,)
    assert not compiled


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_rows_that_come_and_go_compile_nothing(cache_dtype, tokenizer, file):
    """Once the programs are there: neither the widths nor what moves caches between them."""
    batch = Batch(llama.load(file, cache_dtype=cache_dtype), widths=[1, 2, 3], room=256, longest_chunk=32)
    for compile_program in batch.programs():
        compile_program()
    compiled, widths, caches = [], [], batch._caches

    def listen(event, duration_secs, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for width, kept in ((1, []), (2, [0]), (1, [1]), (3, [0]), (2, [0, 2]), (2, []), (3, [])):
            caches.resize(width, kept)
            widths.append(jax.tree.leaves(caches._blocks)[0].shape[0])
        for text in SAID:
            batch.add(ask(tokenizer, text))
        assert len(list(batch.run())) == len(SAID)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert widths == [1, 2, 1, 3, 2, 2, 3]
    assert not compiled


def test_no_cache_is_copied(model):
    batch = Batch(model, widths=[2], room=256)
    entries, heads, size = jax.tree.leaves(batch._reader.shapes)[0].shape
    for program in batch._caches.programs(2):
        assert f"f32[2,{entries},{heads},{size}]" in program.as_text()
        assert not re.search(rf"= f32\[2,{entries},{heads},{size}\]\S* copy\(", program.as_text())
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 4_000_000  # logits, and noise to draw with; all caches have 50,000,000
        assert memory.alias_size_in_bytes >= 2 * 60 * 256 * 3 * 64 * 4


def test_the_room_ends(model, tokenizer):
    request = ask(tokenizer, "Count from one to a hundred." + " Please." * 90, max_tokens=200)
    batch = Batch(model, widths=[1], room=256)
    batch.add(request)
    assert list(batch.run()) == [request]
    assert (request.answer.finish, len(request.prompt) + request.answer.num_tokens) == ("context", 256)
    with pytest.raises(ValueError, match=r"expected a prompt of 1 to 255 tokens; got 256 tokens"):
        batch.add(Request([1] * 256, Answer(tokenizer), 1))


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
        ("a.txt", b"\xff\xff", r"a.txt to be UTF-8; got byte 0xff at 0"),
        ("a.jsonl", b'\n{"prompt": ', r"a.jsonl:2: expected a JSON object; got Expecting value.*"),
        ("a.jsonl", b'{"text": "hi"}', r'a.jsonl:1: expected an object with a "prompt" and.*; got {"text": "hi"}'),
        ("a.jsonl", b'{"prompt": 3}', r'a.jsonl:1: expected an object with .*, both text; got {"prompt": 3}'),
        ("a.jsonl", b"[" * 100_000, r"a.jsonl:1: expected a JSON object; got maximum recursion depth exceeded.*"),
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
    error = capsys.readouterr().err
    assert re.fullmatch(rf"generate: error: (expected )?{re.escape(str(tmp_path))}/{message}\n", error), error


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(
        UsageError, match=r"expected .*none.txt to be a file that can be read; got .*No such file or directory"
    ):
        read_prompts(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--rows", "2"], "expected --rows with --prompts; got it without"),
        (["--prompts", "a.txt", "--rows", "0"], "expected --rows of 1 or more; got 0"),
        (
            ["--prompts", "a.txt", "--chat"],
            "expected one of a prompt, --prompt-file, --chat and --prompts; got --chat and --prompts",
        ),
    ],
)
def test_wrong_options(arguments, message, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"generate: error: {message}\n"
