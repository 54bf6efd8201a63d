"""The tokens of a model, and how texts become tokens: what a `models.tokens.tokenizer.Tokenizer` needs to know."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
import tokenizers.models
from tokenizers import normalizers

from .._errors import ModelFileError
from ..gguf_format import field
from . import words
from .chat_template import ChatTemplate
from .sentencepiece import Sentencepiece, bytes_of_piece


_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # kinds of tokens
_UNSUPPORTED = "which is not supported. Use another model."
_CORRUPT = "The file is corrupt: get it again."

# GPT-2 writes bytes as characters: printable ones as themselves, the others as those from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)).difference(_PRINTABLE))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}

# Tokens that end an answer, whatever else a model's files say: llama.cpp's, without those of models that are not supported, and
# of texts that are to be filled in.
_ENDS = frozenset(
    (
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>"),
        *("<EOT>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    )
)
# Only where it is a control token: elsewhere it is the end of a text that HTML strikes out.
_END_OR_TEXT = "</s>"
# The kind of words before which texts are normalised.
_NORMALISED = "qwen2"
# Sentencepiece's tokens, for files that do not say.
_SPECIAL_OF_SENTENCEPIECE = {"bos": 1, "eos": 2}


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model."""

    size: int
    control: Mapping[str, int]
    """The tokens that are not text, such as `<|im_end|>`, by the text that stands for them."""
    encode: Callable[[str, bool], Sequence[int]]
    """The tokens of a text, in which none is a control token, and of which is said whether nothing is before it."""
    piece: Callable[[int], bytes]
    """The bytes of a token that is not a control token."""
    stop_tokens: frozenset[int]
    """The tokens that end an answer."""
    template: ChatTemplate
    first: int | None = None
    """The token that texts have to begin with."""
    shortens: bool = False
    """True if texts are normalised before they become tokens, which may make them shorter."""
    drops_space: bool = False
    """True if the first space of a text comes from the tokenizer, and is not part of it."""


def gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The tokens in a GGUF file: a byte-level BPE as of GPT-2, or sentencepiece's BPE as of Llama 2.

    **Arguments:**

    - `metadata`: of a `models.gguf.ModelFile`.

    **Raises:**

    - `ModelFileError` if the file has another kind of tokenizer, or a broken one.
    """
    _check_kind(metadata)
    tokens = field(metadata, "tokenizer.ggml.tokens", list)
    kinds = field(metadata, "tokenizer.ggml.token_type", np.ndarray)
    if len(set(tokens) - {""}) != len(tokens) or len(kinds) != len(tokens):
        raise ModelFileError(
            f"expected {len(tokens)} tokens, each with a text of its own and a type; got {len(set(tokens))} different texts "
            f"and {len(kinds)} types. {_CORRUPT}"
        )

    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    defaults = _SPECIAL_OF_SENTENCEPIECE if is_sentencepiece else {}

    def special(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in metadata:
            return defaults.get(name)
        token = field(metadata, key, int)
        if not 0 <= token < len(tokens):
            raise ModelFileError(f"expected {key} to be one of {len(tokens)} tokens; got {token}. {_CORRUPT}")
        return token

    # Files have some of them as tokens that are text, by which a message could end its turn.
    kinds = np.where([token in _ENDS for token in tokens], _CONTROL, kinds)
    bos, eos = special("bos"), special("eos")
    not_text = (_UNKNOWN, _CONTROL) if is_sentencepiece else (_CONTROL,)
    control = {tokens[i]: i for i in np.flatnonzero(np.isin(kinds, not_text)).tolist()}
    as_they_are = frozenset(np.flatnonzero(kinds == _USER_DEFINED).tolist())
    encode = (_sentencepiece if is_sentencepiece else _byte_level_bpe)(metadata, tokens, kinds)
    bytes_of_token = bytes_of_piece if is_sentencepiece else bytes_of
    names = {f"{name}_token": "" if token is None else tokens[token] for name, token in (("bos", bos), ("eos", eos))}
    name = "tokenizer.chat_template"
    return Vocabulary(
        size=len(tokens),
        control=control,
        encode=lambda text, _: encode(text),
        piece=lambda token: (str.encode if token in as_they_are else bytes_of_token)(tokens[token]),
        stop_tokens=stop_tokens(control, (eos, special("eot"), special("eom"))),
        template=ChatTemplate(field(metadata, name, str, ""), name, names),
        shortens=not is_sentencepiece and metadata["tokenizer.ggml.pre"] == _NORMALISED,
        first=bos if _adds_bos(metadata) else None,
        drops_space=is_sentencepiece and _adds_space(metadata),
    )


def bytes_of(token: str) -> bytes:
    """The bytes of a token of a byte-level BPE."""
    if not _BYTE_OF.keys() >= set(token):
        return token.encode()
    return bytes(map(_BYTE_OF.__getitem__, token))


def stop_tokens(control: Mapping[str, int], more: Sequence[int | None]) -> frozenset[int]:
    """The tokens that end an answer: those of the control tokens that do so for all models, and `more`."""
    stops = (*more, *(control.get(end) for end in (*_ENDS, _END_OR_TEXT)))
    return frozenset(token for token in stops if token is not None)


def _check_kind(metadata: Mapping[str, Any]) -> None:
    supported: dict[str, tuple[str, ...]] = {"model": ("gpt2", "llama")}
    switches = ["add_eos_token"]
    if field(metadata, "tokenizer.ggml.model", str) == "gpt2":
        supported["pre"] = words.NAMES
        switches.append("add_space_prefix")
    for key, values in supported.items():
        value = field(metadata, f"tokenizer.ggml.{key}", str)
        if value not in values:
            raise ModelFileError(
                f"expected tokenizer.ggml.{key} to be {' or '.join(map(repr, values))}; got {value!r}, {_UNSUPPORTED}"
            )
    for key in switches:
        if field(metadata, f"tokenizer.ggml.{key}", bool, False):
            raise ModelFileError(f"expected tokenizer.ggml.{key} to be false; got true, {_UNSUPPORTED}")


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """True if texts begin with the token `bos`: as the file says, or else as llama.cpp has it for such a tokenizer."""
    default = metadata["tokenizer.ggml.model"] == "llama" or metadata["tokenizer.ggml.pre"] in words.LLAMA3
    return field(metadata, "tokenizer.ggml.add_bos_token", bool, default)


def _adds_space(metadata: Mapping[str, Any]) -> bool:
    return field(metadata, "tokenizer.ggml.add_space_prefix", bool, True)


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: np.ndarray
) -> Callable[[str], Sequence[int]]:
    scores = field(metadata, "tokenizer.ggml.scores", np.ndarray)
    numbers = {token: i for i, token in enumerate(tokens)}
    bytes_ = [numbers.get(f"<0x{byte:02X}>") for byte in range(256)]
    if len(scores) != len(tokens) or np.isnan(scores).any() or None in bytes_:
        raise ModelFileError(
            f"expected a score for each of {len(tokens)} tokens, and a token for each byte; got {len(scores)} scores, "
            f"{np.isnan(scores).sum()} of them NaN, and {256 - bytes_.count(None)} bytes. {_CORRUPT}"
        )

    def of(*kind: int) -> dict[str, int]:
        return {tokens[i]: i for i in np.flatnonzero(np.isin(kinds, kind)).tolist()}

    not_text = of(_UNKNOWN, _CONTROL, _BYTE)
    return Sentencepiece(
        {token: i for token, i in numbers.items() if token not in not_text},
        scores.tolist(),
        [byte for byte in bytes_ if byte is not None],
        of(_USER_DEFINED),
        adds_space=_adds_space(metadata),
    ).encode


def _byte_level_bpe(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: np.ndarray
) -> Callable[[str], Sequence[int]]:
    """Make the tokenizer without the control tokens: to it their texts are texts."""
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in field(metadata, "tokenizer.ggml.merges", list)]
    kind = metadata["tokenizer.ggml.pre"]
    try:
        # Merges of another length than two are refused when they are taken.
        model = tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=kind in words.LLAMA3)  # pyright: ignore[reportArgumentType]
    except Exception as error:  # of no class of its own
        raise ModelFileError(f"expected pairs of tokens in tokenizer.ggml.merges; got {error}. {_CORRUPT}") from None
    bpe = tokenizers.Tokenizer(model)
    if kind == _NORMALISED:
        bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = words.pre_tokenizer(kind)
    as_they_are = np.flatnonzero(kinds == _USER_DEFINED).tolist()
    bpe.add_tokens([tokenizers.AddedToken(tokens[i], normalized=False) for i in as_they_are])
    # As a batch of one: `encode` keeps Python's lock, and so all threads from running, for as long as it takes.
    return lambda text: bpe.encode_batch_fast([text])[0].ids
