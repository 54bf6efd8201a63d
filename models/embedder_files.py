"""A model of sentences in a folder, as sentence-transformers writes it: what its files say beside the weights."""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import tokenizers
from tokenizers import normalizers

from . import bert
from ._errors import ModelFileError
from ._json import read_json, read_object


_REMEDY = "Get it again."
_UNSUPPORTED = "which is not supported. Use another model."
# How poolings were told before `pooling_mode`, each by a switch of its own.
_SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Names of prompts for texts that are searched.
_DOCUMENT = ("document", "passage", "corpus")
# Settings of sentence-transformers that change vectors, and have to be off.
_OFF = ("processing_kwargs", "query_length", "document_length", "query_expansion")


# What vectors of texts are for: to search with, or to be found.
Task = Literal["query", "document"]


class Folder(NamedTuple):
    """**Attributes:**

    - `weights`: the folder with the encoder's safetensors files.
    - `config`: the encoder's.
    - `pooling`: makes one vector of all tokens'.
    - `tokenizer`: cuts texts to `max_tokens`.
    - `max_tokens`: of a text.
    - `prompts`: what is written before texts for a task, or, by `None`, before others.
    """

    weights: pathlib.Path
    config: bert.Config
    pooling: bert.Pooling
    tokenizer: tokenizers.Tokenizer
    max_tokens: int
    prompts: Mapping[Task | None, str]


def read_folder(folder: pathlib.Path) -> Folder:
    """Read all files but the weights.

    **Raises:**

    - `ModelFileError` if a file is missing, broken, or asks for what is not supported.
    """
    if not folder.is_dir():
        what = "a file" if folder.exists() else "a path that does not exist"
        raise ModelFileError(f"{folder}: expected a model's folder; got {what}.")
    encoder, pooled, normalizes = _modules(folder)
    settings = read_object(encoder / "config.json")
    try:
        config = bert.config_of(settings)
    except ModelFileError as error:
        raise ModelFileError(f"{encoder / 'config.json'}: {error}") from None
    path = encoder / "sentence_bert_config.json"
    settings = read_object(path) if path.exists() else {}
    for key in _OFF:
        if settings.get(key):
            raise ModelFileError(f"{path}: expected {key} to be off; got {settings[key]!r}, {_UNSUPPORTED}")
    max_tokens = _max_tokens(path, settings, config.num_positions)
    return Folder(
        encoder,
        config,
        bert.Pooling(_pooling_mode(pooled / "config.json"), normalizes),
        _tokenizer(
            encoder / "tokenizer.json", config.vocab_size, max_tokens, lowers=bool(settings.get("do_lower_case"))
        ),
        max_tokens,
        _prompts(folder / "config_sentence_transformers.json"),
    )


@contextlib.contextmanager
def blaming(path: pathlib.Path) -> Iterator[None]:
    """Raise `ModelFileError` in place of whatever the tokenizer of a file raises."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of no class of its own; Rust's panics are no Exceptions
        raise ModelFileError(f"{path}: expected a tokenizer; got {error}. {_REMEDY}") from None


def _modules(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path, bool]:
    """The folders of the encoder and of the pooling, and whether vectors are divided by their norm."""
    path = folder / "modules.json"
    if not path.exists():  # an encoder alone
        return folder, folder / "1_Pooling", True
    modules = read_json(path)

    def has_texts(module: Any) -> bool:
        return isinstance(module, dict) and all(isinstance(module.get(key), str) for key in ("path", "type"))

    if not isinstance(modules, list) or not all(map(has_texts, modules)):
        raise ModelFileError(f"{path}: expected a list of modules, each with a path and a type; got others. {_REMEDY}")
    kinds = [_kind(module["type"]) for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ModelFileError(
            f"{path}: expected modules Transformer, Pooling and, if need be, Normalize; got {', '.join(kinds)}, {_UNSUPPORTED}"
        )
    return folder / modules[0]["path"], folder / modules[1]["path"], kinds[2:] == ["Normalize"]


def _kind(name: str) -> str:
    """The class, without the file that it is in, which depends on the version of sentence-transformers."""
    return name.rpartition(".")[2] if name.startswith("sentence_transformers.") else name


def _pooling_mode(path: pathlib.Path) -> str:
    settings = read_object(path) if path.exists() else {}
    modes: Any = settings.get("pooling_mode")
    if modes is None:
        given = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value]
        modes = [_SWITCHES.get(key, key) for key in given] or "mean"
    mode = modes[0] if isinstance(modes, list) and len(modes) == 1 else modes
    if mode not in bert.POOLING_MODES:
        expected = " or ".join(map(repr, bert.POOLING_MODES))
        raise ModelFileError(f"{path}: expected pooling_mode to be {expected}; got {mode!r}, {_UNSUPPORTED}")
    if not settings.get("include_prompt", True):
        raise ModelFileError(f"{path}: expected include_prompt to be true; got false, {_UNSUPPORTED}")
    return mode


def _max_tokens(path: pathlib.Path, settings: Mapping[str, Any], num_positions: int) -> int:
    """The model's own limit, or that of its tokenizer if it has none, or else its positions."""
    value = settings.get("max_seq_length")
    if value is not None:
        if type(value) is not int or not 2 < value <= num_positions:
            raise ModelFileError(
                f"{path}: expected max_seq_length from 3 to {num_positions}, the positions; got {value!r}."
            )
        return value
    path = path.with_name("tokenizer_config.json")
    value = read_object(path).get("model_max_length") if path.exists() else None
    if value is None:
        return num_positions
    if type(value) not in (int, float) or not value > 2:
        raise ModelFileError(f"{path}: expected model_max_length of 3 or more; got {value!r}. {_REMEDY}")
    return int(min(value, num_positions))  # a tokenizer without a limit has 10^30


def _prompts(path: pathlib.Path) -> dict[Task | None, str]:
    settings = read_object(path) if path.exists() else {}
    prompts: Any = settings.get("prompts") or {}
    default = settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ModelFileError(f"{path}: expected prompts, each a text with a name; got {prompts!r:.80}. {_REMEDY}")
    # Two names that sentence-transformers gives every model.
    names = ["query", "document", *prompts]
    if default is not None and default not in names:
        raise ModelFileError(
            f"{path}: expected default_prompt_name to be one of {', '.join(names)}; got {default!r}. {_REMEDY}"
        )
    texts = {name: text for name, text in prompts.items() if text}

    def first(*names: str | None) -> str:
        return next((texts[name] for name in names if name in texts), "")

    return {None: first(default), "query": first("query", default), "document": first(*_DOCUMENT, default)}


def _tokenizer(path: pathlib.Path, vocab_size: int, max_tokens: int, *, lowers: bool) -> tokenizers.Tokenizer:
    with blaming(path):
        tokenizer = tokenizers.Tokenizer.from_file(os.fspath(path))
        # The file's own settings are of the training.
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_tokens)
        if lowers:
            others = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
            tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])
    if tokenizer.get_vocab_size() > vocab_size:
        raise ModelFileError(
            f"{path}: expected at most {vocab_size} tokens, those of the model; got {tokenizer.get_vocab_size()}."
        )
    return tokenizer
