"""Text as training reads it: tokens of a byte-level BPE that the text itself trained, and the batches of each step.

The first nine tenths of the text are trained on, and the rest is held out. Tokens and tokenizer are kept in the run's folder, so
that a run that goes on needs the text no more.
"""

import contextlib
import itertools
import os
import pathlib
import re
import signal
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .. import _text
from .._errors import ModelFileError
from .._replacing import replace_file


TOKENS, TOKENIZER = "tokens.npy", "tokenizer.json"
SMALLEST_VOCABULARY = 256
"""A token for each byte."""
LARGEST_VOCABULARY = 2**20
"""A tokenizer's trainer takes memory for as many tokens as it may make, before it sees the text."""

# The time for a word grows with its square, and the memory for a piece is 165 times its own. A piece ends where words end, before
# space or punctuation, so that its tokens are those that the line has. Only a longer word, such as one of DNA, is cut.
_PIECE = re.compile(r"(?s).{1,2048}(?:\Z|(?<=\S)(?=\s)|(?<=[^\W_])(?=[^\w\s]))|.{1,2048}")
_PIECES = 256  # so many are encoded at a time
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
) -> int:
    """Train a tokenizer on a text, and write it and the text's tokens to a folder.

    **Arguments:**

    - `vocab_size`: tokens at most, from 256 to 2**20: a short text has fewer.
    - `progress`: as `_program.progress`.

    **Returns:** a checksum of the tokens, for `Text`.
    """
    pieces = [piece for line in text.splitlines(keepends=True) for piece in _PIECE.findall(line)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,  # pyright: ignore[reportCallIssue]
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Of one item more than it counts: so the bar is there while what was counted is merged.
    bar = iter(progress([*pieces, ""], desc="training a tokenizer", unit="line"))
    with _ended_by_ctrl_c():
        tokenizer.train_from_iterator(itertools.islice(bar, len(pieces)), trainer)
    del bar  # which ends it
    parts = [np.zeros(0, np.int32)]
    for first in progress(range(0, len(pieces), _PIECES), desc="encoding", unit="part"):
        for encoding in tokenizer.encode_batch_fast(pieces[first : first + _PIECES], add_special_tokens=False):
            parts.append(np.asarray(encoding.ids, np.int32))
    tokens = np.concatenate(parts)

    def write_tokens(partial: pathlib.Path) -> None:
        with partial.open("wb") as file:
            np.save(file, tokens)

    replace_file(folder / TOKENS, write_tokens)
    # Not by its own `save`, which raises errors without a class.
    replace_file(folder / TOKENIZER, lambda partial: partial.write_text(tokenizer.to_str(pretty=True), "utf-8"))
    return zlib.crc32(tokens.data)


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once, as Python would wait for code in Rust to end. Only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def open_tokenizer(folder: pathlib.Path) -> Tokenizer:
    """Return the tokenizer that `prepare` wrote. Raises `ModelFileError`."""
    try:
        return Tokenizer.from_file(os.fspath(folder / TOKENIZER))
    except Exception as error:  # what tokenizers raises has no class
        raise ModelFileError(f"expected a tokenizer in {folder / TOKENIZER}; got {error}") from None


class Text:
    """The tokens of a run, and its batches: windows that the seed and the step's number draw."""

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        length: int,
        batch: int,
        seed: int,
        accumulate: int = 1,
        vocab_size: int = LARGEST_VOCABULARY,
        checksum: int | None = None,
    ):
        """**Arguments:**

        - `folder`: what `prepare` wrote.
        - `length`: the tokens of a window that a model reads.
        - `batch`: the windows that are in memory at a time.
        - `seed`: of the draws.
        - `accumulate`: how many times as many windows a step has.
        - `vocab_size`: the number of tokens that the model has.
        - `checksum`: what `prepare` returned, or None if that is not known.

        **Raises:** `ModelFileError` if the tokens are not those of `prepare`, or too few.
        """
        path = folder / TOKENS
        try:
            tokens = np.load(path, mmap_mode="r")
            if tokens.dtype != np.int32 or tokens.ndim != 1:
                raise ValueError(f"{tokens.dtype} of shape {tokens.shape}")
        except (OSError, ValueError, EOFError) as error:
            raise ModelFileError(f"expected tokens in {path}; got {error}") from None
        if checksum is not None and zlib.crc32(tokens.data) != checksum:
            raise ModelFileError(
                f"expected {path} as the run began with it; it was changed. Put it back, or begin anew."
            )
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ModelFileError(
                f"expected tokens from 0 to {vocab_size - 1} in {path}; got {tokens.min()} to {tokens.max()}. "
                "Put it back, or begin anew."
            )
        held_out = max(int(len(tokens) * _HELD_OUT), length + 1)
        self.trained, self._held_out = tokens[: len(tokens) - held_out], tokens[len(tokens) - held_out :]
        if len(self.trained) <= length:
            raise ModelFileError(
                f"expected a text of {2 * length + 2} tokens or more, twice --length; got {len(tokens)}. "
                "Lower --length, or pass another text."
            )
        self._length, self._batch, self._seed, self._accumulate = length, batch, seed, accumulate

    def batch(self, step: int) -> Int[np.ndarray, "batch more"]:
        """Return the windows of a step, each of one token more than the model reads."""
        count = self._batch * self._accumulate
        starts = np.random.default_rng((self._seed, step)).integers(0, len(self.trained) - self._length, count)
        return np.stack([self.trained[start : start + self._length + 1] for start in starts])

    def held_out(self) -> list[Int[np.ndarray, "batch more"]]:
        """Return the batches that no step sees: some windows, evenly spaced and side by side at most."""
        windows = (len(self._held_out) - 1) // self._length
        batch = min(self._batch, windows)
        count = min(_BATCHES_HELD_OUT, windows // batch)
        starts = [windows * i // (batch * count) * self._length for i in range(batch * count)]
        rows = np.stack([self._held_out[start : start + self._length + 1] for start in starts])
        return list(rows.reshape(count, batch, -1))
