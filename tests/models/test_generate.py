"""The program: `python -m models.generate`."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from models.generate.__main__ import main


ROOT = pathlib.Path(__file__).parents[2]
SPEED = r"prompt: \d+ tokens, [\d.]+ tokens per second; decode: \d+ tokens, [\d.]+ tokens per second\n"


def generate(*arguments):
    command = [sys.executable, "-m", "models.generate", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "XLA_FLAGS": ""}, capture_output=True, text=True)


def test_the_capital_of_france():
    result = generate("What is the capital of France?")
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "<|im_end|>" not in result.stdout
    assert re.search(SPEED, result.stderr)


def test_options_and_the_same_text_twice():
    options = ["Say hello.", "--system", "You are a pirate.", "--temperature", 0.8, "--top-p", 0.9, "--max-tokens", 12]
    first, second = (generate(*options, "--seed", 3, "--dtype", "bf16") for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert first.stdout.strip()
    decoded = re.search(r"decode: (\d+) tokens", first.stderr)
    assert decoded is not None
    assert int(decoded[1]) <= 11


def test_a_stop_string_is_not_printed(capsys):
    assert main(["What is the capital of France?", "--stop", "nothing", "--stop", "tal of Fr"]) == 0
    assert capsys.readouterr().out == "The capi\n"


def test_json(capsys):
    assert main(["What is the capital of France?", "--json"]) == 0
    written = capsys.readouterr()
    record = json.loads(written.out)
    speeds = [record.pop(f"{what}_tokens_per_second") for what in ("read", "decoded")]
    assert min(speeds) > 0
    assert record == {
        "text": "The capital of France is Paris.",
        "finish": "stop_token",
        "stop_string": None,
        "answer_tokens": 8,
        "kept_tokens": 0,
        "read_tokens": 37,
        "decoded_tokens": 7,
        "guessed_tokens": 0,
        "accepted_tokens": 0,
    }
    assert "tokens per second" not in written.err


def test_the_answer_comes_as_it_is_made():
    command = [sys.executable, "-m", "models.generate", "Count from one to a hundred.", "--max-tokens", "200"]
    environment = {**os.environ, "XLA_FLAGS": ""}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5)
        assert process.poll() is None  # it goes on
        process.stdout.close()  # nobody reads any more
        assert process.wait(60) == 0
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected one of a prompt, --prompt-file, --chat and --prompts; got none"),
        (
            ["hi", "--weights", "/no/such/file.gguf"],
            "/no/such/file.gguf: expected a file; got a path that does not exist",
        ),
        (
            ["hi", "--weights", "."],
            "expected a GGUF file, or a model's folder with config.json; got a folder without it",
        ),
        (
            ["hi", "--weights", "README.md"],
            "expected a GGUF file, which starts with b'GGUF'; got bytes that start with",
        ),
        (["word " * 9000], r"expected a prompt of less than 8192 tokens, the model's context; got 90\d\d. Shorten it"),
        (["hi", "--max-tokens", "0"], "expected --max-tokens of 1 or more; got 0"),
        (["hi", "--max-tokens", "many"], "argument --max-tokens: invalid int value: 'many'"),
        (["hi", "--temperature", "-1"], "expected --temperature from 0 to 2; got -1.0"),
        (["hi", "--temperature", "1e300"], r"expected --temperature from 0 to 2; got 1e\+300"),
        (["hi", "--temperature", "nan"], "expected --temperature from 0 to 2; got nan"),
        (["hi", "--top-p", "0"], "expected --top-p above 0 and up to 1; got 0.0"),
        (["hi", "--top-k", "-1"], r"expected --top-k from 0 to 2\*\*31 - 1; got -1"),
        (["hi", "--top-k", str(2**31)], r"expected --top-k from 0 to 2\*\*31 - 1; got 2147483648"),
        (["hi", "--min-p", "1.5"], "expected --min-p from 0 to 1; got 1.5"),
        (["hi", "--repetition-penalty", "0"], "expected --repetition-penalty from 0.01 to 100; got 0.0"),
        (["hi", "--repetition-penalty", "1e-50"], "expected --repetition-penalty from 0.01 to 100; got 1e-50"),
        (["hi", "--stop", ""], "expected --stop of at least one character; got ''"),
        (["hi", "--seed", "-1"], r"expected --seed from 0 to 2\*\*32 - 1; got -1"),
        (["hi", "--dtype", "f16"], "argument --dtype: invalid choice: 'f16'"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    code = main([str(argument) for argument in arguments])
    written = capsys.readouterr()
    assert (code, written.out) == (2, "")
    assert re.fullmatch(rf"generate: error: .*{message}.*\n", written.err), written.err


def test_a_file_that_is_cut_off(tmp_path):
    from models import gguf

    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf.default_path().read_bytes()[:50_000_000])
    result = generate("hi", "--weights", path)
    assert result.returncode == 2
    assert re.fullmatch(r"generate: error: .*cut.gguf: .*truncated.*\n", result.stderr), result.stderr


def test_a_full_disk():
    command = [sys.executable, "-m", "models.generate", "hi", "--max-tokens", "3"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "XLA_FLAGS": ""}, stdout=full, stderr=subprocess.PIPE
        )
    assert result.returncode == 2
    assert result.stderr.endswith(
        b"generate: error: the results cannot be written: [Errno 28] No space left on device\n"
    )
    assert b"Traceback" not in result.stderr


def test_a_terminal_without_the_characters_and_no_stderr():
    command = f"{sys.executable} -m models.generate 'Write the German word for street.' --max-tokens 8 2>&-"
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.strip()
    assert "tokens per second" not in result.stdout
