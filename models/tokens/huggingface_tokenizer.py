"""The tokens of a model's folder: `tokenizer.json`, through the `tokenizers` package, and the files beside it."""

import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from .._errors import ModelFileError
from .._json import read_object
from .._text import without_surrogates
from .chat_template import ChatTemplate
from .sentencepiece import bytes_of_piece
from .vocabulary import Vocabulary, bytes_of, stop_tokens


_REMEDY = "Get it again."

# Classes of transformers 4 that do what the settings say, and not what the post-processor does. Version 5 writes no such setting,
# and llama.cpp's converter takes it for each class.
_TAKES_ADD_BOS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")


def read_vocabulary(folder: pathlib.Path, vocab_size: int) -> Vocabulary:
    """The tokens of a folder, as Hugging Face's transformers has them.

    **Arguments:**

    - `folder`: with `tokenizer.json`, and, where the model has them, `tokenizer_config.json`, `generation_config.json`, and
        `chat_template.jinja`.
    - `vocab_size`: the number of tokens that the model has logits for. The tokenizer may have fewer, or tokens that were added to
        it alone, with which `models.tokens.tokenizer.Tokenizer` encodes no text.

    **Raises:**

    - `ModelFileError` if a file is missing, broken, or of another kind.
    """
    path = folder / "tokenizer.json"
    settings = read_object(path)
    tokenizer = _tokenizer(path)
    pre_tokenizer = json.dumps(settings.get("pre_tokenizer"))
    inner = pre_tokenizer.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
    later = tokenizer
    if inner != pre_tokenizer:  # a space before the first word of a text
        later = _tokenizer(path, settings | {"pre_tokenizer": json.loads(inner)})
    tokens = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    added = tokenizer.get_added_tokens_decoder()
    last = max(tokens.keys() - added.keys(), default=-1)
    if last >= vocab_size:
        raise ModelFileError(f"{path}: expected tokens below {vocab_size}, but for added ones; got {last}. {_REMEDY}")
    special = [token for token in added.values() if token.special]
    if stripping := [token.content for token in special if token.lstrip or token.rstrip]:
        raise ModelFileError(
            f"{path}: expected special tokens that keep the spaces around them; got {stripping[0]!r}, which is not supported."
        )
    control = {token.content: i for i, token in added.items() if token.special}
    bytes_of_token, drops_space = _decoder(path, settings)
    config_path = folder / "tokenizer_config.json"
    config = read_object(config_path) if config_path.exists() else {}
    names = _special_tokens(config_path, config)
    end = tokenizer.token_to_id(names["eos_token"])

    def encode(text: str, is_first: bool) -> Sequence[int]:
        # As a batch of one: the method `encode` keeps Python's lock, and so all threads from running, for as long as it takes.
        return (tokenizer if is_first else later).encode_batch_fast([text], add_special_tokens=False)[0].ids

    return Vocabulary(
        size=vocab_size,
        control=control,
        encode=encode,
        piece=lambda token: added[token].content.encode() if token in added else bytes_of_token(tokens.get(token, "")),
        stop_tokens=stop_tokens(control, [end, *_ends(folder, vocab_size)]),
        template=ChatTemplate(_template(folder, config), "a chat template", names),
        first=_first(path, tokenizer, vocab_size, config, names["bos_token"]),
        shortens=tokenizer.normalizer is not None,
        drops_space=drops_space,
    )


def _tokenizer(path: pathlib.Path, settings: Mapping[str, Any] | None = None) -> tokenizers.Tokenizer:
    """The tokenizer of a file, or of settings in its place."""
    load = tokenizers.Tokenizer.from_file if settings is None else tokenizers.Tokenizer.from_str
    try:
        tokenizer = load(os.fspath(path) if settings is None else json.dumps(settings))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of no class of its own; Rust's panics are no Exceptions
        raise ModelFileError(f"{path}: expected a tokenizer; got {error}. {_REMEDY}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # as texts: control tokens are not its concern
    return tokenizer


def _first(
    path: pathlib.Path, tokenizer: tokenizers.Tokenizer, vocab_size: int, config: Mapping[str, Any], bos_token: str
) -> int | None:
    """The token that the settings, or else the post-processor, put before a text, or `None`."""
    adds_bos, bos = config.get("add_bos_token"), tokenizer.token_to_id(bos_token)
    takes_it = str(config.get("tokenizer_class")).removesuffix("Fast") in _TAKES_ADD_BOS
    if takes_it and adds_bos is True and bos is not None:
        before = [bos]
    elif takes_it and adds_bos is False:
        before = list[int]()
    else:
        encoded = tokenizer.encode("a")  # not an empty text, as tokens may follow it as well
        is_added = [*encoded.special_tokens_mask, 0]
        before = encoded.ids[: is_added.index(0)]
    if len(before) > 1 or any(token >= vocab_size for token in before):
        raise ModelFileError(
            f"{path}: expected one token below {vocab_size} before a text, or none; got {before}, which is not supported."
        )
    return before[0] if before else None


def _decoder(path: pathlib.Path, settings: Mapping[str, Any]) -> tuple[Callable[[str], bytes], bool]:
    """The bytes of a token, and whether the first space of a text is not part of it."""
    decoders = {decoder.get("type"): decoder for decoder in _flat(settings.get("decoder"))}
    if "ByteLevel" in decoders:
        return bytes_of, False
    if "ByteFallback" in decoders or "Metaspace" in decoders:
        strips = decoders.get("Strip", {}).get("start", 0) > 0
        return bytes_of_piece, strips or decoders.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
    raise ModelFileError(
        f"{path}: expected a decoder of bytes, ByteLevel or ByteFallback, or Metaspace; got "
        f"{', '.join(map(str, decoders)) or 'none'}, which is not supported."
    )


def _flat(decoder: Any) -> Iterator[dict[str, Any]]:
    if isinstance(decoder, dict):
        parts = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
        yield from (part for part in parts or [] if isinstance(part, dict))


def _special_tokens(path: pathlib.Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of tokens that templates use by name, or empty ones."""
    texts: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name) or ""
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str) or without_surrogates(text) != text:
            raise ModelFileError(f"{path}: expected {name} to be a token; got {token!r}. {_REMEDY}")
        texts[name] = text
    return texts


def _ends(folder: pathlib.Path, vocab_size: int) -> list[int]:
    """The tokens that end an answer, by the settings of generation, or else those of the model."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ends = read_object(path).get("eos_token_id") if path.exists() else None
        if ends is not None:
            ends = ends if isinstance(ends, list) else [ends]
            if wrong := [end for end in ends if type(end) is not int or not 0 <= end < vocab_size]:
                raise ModelFileError(
                    f"{path}: expected eos_token_id of tokens below {vocab_size}; got {wrong[0]!r}. {_REMEDY}"
                )
            return ends
    return []


def _template(folder: pathlib.Path, config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{path}: expected a text; got {error}. {_REMEDY}") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default")
    if not isinstance(template, str | None):
        path = folder / "tokenizer_config.json"
        raise ModelFileError(f"{path}: expected chat_template to be a text; got {type(template).__name__}. {_REMEDY}")
    return template or ""
