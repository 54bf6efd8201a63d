"""Text as training reads it: tokens of a byte-level BPE that the text itself trained, and the batches of each step.

The first nine tenths of the text are trained on, and the rest is held out. Tokens and tokenizer are kept in the run's folder, so
that a run that goes on needs the text no more.
"""

import itertools
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .. import _text
from .._errors import ModelFileError


TOKENS, TOKENIZER = "tokens.npy", "tokenizer.json"
SMALLEST_VOCABULARY = 256
"""A token for each byte."""
LARGEST_VOCABULARY = 2**20
"""A tokenizer's trainer takes memory for as many tokens as it may make, before it sees the text."""

_LINES = 4096  # so many are encoded at a time
_HELD_OUT = 0.1
_BATCHES_HELD_OUT = 8


def read_text(path: pathlib.Path | None) -> str:
    """Return a file's text, or Python's own reference: what `help()` shows of the language, 0.4 MB of English.

    **Raises:**

    - `UsageError` if the file cannot be read or is not UTF-8.
    - `ModelFileError` if Python came without its reference.
    """
    if path is None:
        try:
            from pydoc_data.topics import topics
        except ImportError:
            raise ModelFileError("expected pydoc_data in this Python, for its text; pass another with --text") from None
        return "\n\n".join(topics.values())
    return _text.read_text(path)


def prepare(
    text: str,
    folder: pathlib.Path,
    *,
    vocab_size: int,
    progress: Callable[..., Iterable[Any]],
) -> None:
    """Train a tokenizer on a text, and write it and the text's tokens to a folder.

    **Arguments:**

    - `vocab_size`: tokens at most, from 256 to 2**20: a short text has fewer.
    - `progress`: as `_program.progress`.
    """
    lines = text.splitlines(keepends=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,  # pyright: ignore[reportCallIssue]
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Of one item more than it counts: so the bar is there while what was counted is merged.
    bar = iter(progress([*lines, ""], desc="training a tokenizer", unit="line"))
    tokenizer.train_from_iterator(itertools.islice(bar, len(lines)), trainer)
    del bar  # which ends it
    parts = []
    for first in progress(range(0, len(lines), _LINES), desc="encoding", unit="part"):
        for encoding in tokenizer.encode_batch_fast(lines[first : first + _LINES], add_special_tokens=False):
            parts.append(np.asarray(encoding.ids, np.int32))
    np.save(folder / TOKENS, np.concatenate(parts) if parts else np.zeros(0, np.int32))
    # Not by its own `save`, which raises errors without a class.
    (folder / TOKENIZER).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def open_tokenizer(folder: pathlib.Path) -> Tokenizer:
    """Return the tokenizer that `prepare` wrote. Raises `ModelFileError`."""
    try:
        return Tokenizer.from_file(os.fspath(folder / TOKENIZER))
    except Exception as error:  # what tokenizers raises has no class
        raise ModelFileError(f"expected a tokenizer in {folder / TOKENIZER}; got {error}") from None


class Text:
    """The tokens of a run, and its batches: windows that the seed and the step's number draw."""

    def __init__(self, folder: pathlib.Path, *, length: int, batch: int, seed: int):
        """**Arguments:**

        - `folder`: what `prepare` wrote.
        - `length`: the tokens of a window that a model reads.
        - `batch`: the windows of a step.
        - `seed`: of the draws.
        """
        try:
            tokens = np.load(folder / TOKENS, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise ModelFileError(f"expected tokens in {folder / TOKENS}; got {error}") from None
        held_out = max(int(len(tokens) * _HELD_OUT), length + 1)
        self.trained, self._held_out = tokens[: len(tokens) - held_out], tokens[len(tokens) - held_out :]
        if len(self.trained) <= length:
            raise ModelFileError(
                f"expected a text of {2 * length + 2} tokens or more, twice --length; got {len(tokens)}. "
                "Lower --length, or pass another text."
            )
        self._length, self._batch, self._seed = length, batch, seed

    def batch(self, step: int) -> Int[np.ndarray, "batch more"]:
        """Return the windows of a step, each of one token more than the model reads."""
        starts = np.random.default_rng((self._seed, step)).integers(0, len(self.trained) - self._length, self._batch)
        return np.stack([self.trained[start : start + self._length + 1] for start in starts])

    def held_out(self) -> list[Int[np.ndarray, "batch more"]]:
        """Return the batches that no step sees: some windows, evenly spaced and side by side at most."""
        windows = (len(self._held_out) - 1) // self._length
        batch = min(self._batch, windows)
        count = min(_BATCHES_HELD_OUT, windows // batch)
        starts = [windows * i // (batch * count) * self._length for i in range(batch * count)]
        rows = np.stack([self._held_out[start : start + self._length + 1] for start in starts])
        return list(rows.reshape(count, batch, -1))
