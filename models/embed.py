"""Vectors of sentences, and search by meaning, on a CPU: `python -m models.embed --file NOTES.txt --search "how to install"`.

The model is all-MiniLM-L6-v2, or any BERT that sentence-transformers keeps in a folder. Sentences come from arguments, a file's
lines or stdin; vectors go to stdout or to a file, one for each sentence and in their order.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from . import _program
from ._program import DTYPES, UsageError
from ._replacing import replace_file
from ._text import read_stdin, read_text
from ._writable import expect_writable
from .compilation_cache import keep_programs
from .embedder import Embedder, default_folder


_SUFFIXES = (".npy", ".jsonl")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = _program.Parser(prog="python -m models.embed", description="Turn sentences into vectors, and search them.")
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="(default: the lines of stdin)")
    parser.add_argument("--file", type=pathlib.Path, metavar="PATH", help="take the lines of a text file")
    parser.add_argument(
        "--output", type=pathlib.Path, metavar="PATH", help="a file of vectors: .npy, or .jsonl with the sentences"
    )
    parser.add_argument("--search", metavar="QUERY", help="print the sentences that mean about the same")
    parser.add_argument("--top", type=int, metavar="N", help="how many of them (default: 5)")
    parser.add_argument(
        "--weights", type=pathlib.Path, metavar="FOLDER", help="a model's folder (default: all-MiniLM-L6-v2)"
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="f32", help="of the computation (default: f32)")
    options = parser.parse_args(arguments)
    if options.sentences and options.file is not None:
        parser.error("expected sentences or --file; got both")
    if options.output is not None and options.output.suffix not in _SUFFIXES:
        parser.error(f"expected --output to end in {' or '.join(_SUFFIXES)}; got {options.output}")
    if options.output is not None and not options.output.parent.is_dir():
        parser.error(f"expected --output in a folder that exists; got {options.output}")
    if options.output is not None and options.output.is_dir():
        parser.error(f"expected --output to be a file; got a folder, {options.output}")
    if options.search is None and options.top is not None:
        parser.error("expected --search QUERY with --top")
    if options.top is not None and options.top < 1:
        parser.error(f"expected --top of 1 or more; got {options.top}")
    if options.search is not None and not options.search.strip():
        parser.error("expected --search of some words; got none")
    return options


def _read(options: argparse.Namespace) -> list[str]:
    if options.sentences:
        return options.sentences
    if options.file is not None:
        text = read_text(options.file)
    elif sys.stdin is not None:
        text = read_stdin()
    else:
        raise UsageError("expected sentences, --file or stdin; got none")
    lines = text.split("\n")  # `splitlines` would end lines where editors do not, as at a form feed
    return lines[:-1] if lines[-1] == "" else lines


def _write(path: pathlib.Path, sentences: Sequence[str], vectors: np.ndarray) -> None:
    def write(partial: pathlib.Path) -> None:
        if path.suffix == ".npy":
            # Not by `np.save`, which says nothing if the disk is full at the last bytes.
            with partial.open("wb") as file:
                np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(vectors))
                file.write(vectors.data)
        else:
            with partial.open("w", encoding="utf-8") as file:
                file.writelines(_json_lines(sentences, vectors))

    try:
        replace_file(path, write)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from None


def _json_lines(sentences: Iterable[str], vectors: np.ndarray) -> Iterator[str]:
    for sentence, vector in zip(sentences, vectors, strict=True):
        # The shortest text that is the same f32 again.
        numbers = ", ".join(map(str, vector))
        yield f'{{"sentence": {json.dumps(sentence)}, "vector": [{numbers}]}}\n'


def _search(query: np.ndarray, sentences: Sequence[str], vectors: np.ndarray, top: int) -> Iterator[str]:
    """The best ones: cosine, number of the line, and text. An empty line means nothing, and is not a result."""
    lines = np.array([i for i, sentence in enumerate(sentences) if sentence.strip()], int)
    norms = np.linalg.norm(vectors[lines], axis=1) * np.linalg.norm(query)  # not 1 for all models
    scores = vectors[lines] @ query / np.maximum(norms, 1e-12)
    for best in np.argsort(-scores, kind="stable")[:top]:
        line = int(lines[best])
        yield f"{scores[best]:.4f}\t{line + 1}\t{sentences[line]}\n"


def _embed(arguments: list[str] | None) -> None:
    options = _parse(arguments)
    sentences = _read(options)
    if not sentences:
        raise UsageError("expected at least one sentence; got none")
    if options.output is not None:
        expect_writable(options.output)
    embedder = Embedder(
        default_folder() if options.weights is None else options.weights,
        dtype=jnp.dtype(DTYPES[options.dtype]),
        progress=_program.progress,
    )
    tokens = embedder.tokenize(sentences, _program.progress, task=None if options.search is None else "document")
    if tokens.cut:
        _program.report(
            f"embed: {tokens.cut} of {len(sentences)} sentences are longer than {embedder.max_tokens} tokens, and were cut"
        )
    vectors = embedder.embed(tokens.sentences, _program.progress)
    if options.output is not None:
        _write(options.output, sentences, vectors)
    if options.search is not None:
        asked = embedder.tokenize([options.search], _program.progress, task="query")
        if asked.cut:
            _program.report(f"embed: the query is longer than {embedder.max_tokens} tokens, and was cut")
        (query,) = embedder.embed(asked.sentences, _program.progress)
        _program.write(_search(query, sentences, vectors, options.top or 5))
    elif options.output is None:
        _program.write(_json_lines(sentences, vectors))


def main(arguments: list[str] | None = None) -> int:
    return _program.run("embed", _embed, arguments, remedy="Pass fewer sentences at a time.")


if __name__ == "__main__":
    keep_programs()
    sys.exit(main())
